"""A preset made ready for one model: `--set` applied, open settings filled from its calibration profile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tiermoe.config import Settings
from tiermoe.decide.compose import Tables, filled, precisions, require_settings, tables
from tiermoe.decide.composition import Composition
from tiermoe.decide.profiles import profile_path, read_profile
from tiermoe.errors import ProfileError
from tiermoe.systems import compose


@dataclass(frozen=True, slots=True)
class Resolved:
    """`settings`: the engine's, with the composition's overrides (bits, dense bits, quantiser). `tables`: of the
    calibration. `precisions`: the bits that experts are loaded in, highest first."""

    settings: Settings
    composition: Composition
    tables: Tables
    precisions: tuple[int, ...]


def resolve(settings: Settings, store: Path, fingerprint: str, model: str) -> Resolved:
    """ConfigError for an unknown preset, part or value; ProfileError where a profile is needed and cannot be used."""
    composition = compose(settings.preset, settings.set)
    profile = None
    if composition.needs_profile:
        command = f"tiermoe calibrate {model} --text FILE --for {composition.profile}"
        profile = read_profile(profile_path(store, composition.profile), fingerprint, command)
        asked = composition.quantizer if "quantizer" in settings.set else None
        composition = filled(composition, profile)
        if asked is not None and asked != composition.quantizer:
            raise ProfileError(
                f"the bitwidths of {settings.preset} were found for {composition.quantizer}, not for {asked}; "
                f"calibrate with --bitwidth-quantizer {asked}, or leave quantizer out"
            )
    require_settings(composition, model)
    settings = replace(
        settings,
        bits=composition.bits or settings.bits_used,
        dense_bits=composition.dense_bits or settings.dense_bits,
        quantizer=composition.quantizer or settings.quantizer,
    )
    found = tables(profile)
    return Resolved(settings, composition, found, precisions(composition, settings.bits_used, found.bits))
