"""A preset made ready for one model: `--set` applied, open settings filled from its calibration profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiermoe.config import Settings
from tiermoe.decide.compose import Tables, filled, precisions, require_settings, tables, with_low_share
from tiermoe.decide.composition import Composition, changed, unread
from tiermoe.decide.profiles import profile_path, read_profile
from tiermoe.errors import ProfileError
from tiermoe.systems import compose

OPTIONS = ("bits", "dense_bits", "quantizer")
"""The engine's options that a preset may have values of its own for. What the user gives stands before them."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """`settings`: the engine's, with the composition's `OPTIONS`. `tables`: of the calibration. `precisions`: the bits
    that experts are loaded in, highest first."""

    settings: Settings
    composition: Composition
    tables: Tables
    precisions: tuple[int, ...]


def resolve(settings: Settings, store: Path, fingerprint: str, model: str, layers: int) -> Resolved:
    """layers: MoE layers of the model. ConfigError for an unknown preset, part or value; ProfileError where a profile
    is needed and cannot be used."""
    options = {name: value for name in OPTIONS if (value := getattr(settings, name)) is not None}
    given = {**options, **settings.set}
    composition = compose(settings.preset, settings.set)
    composition = composition.having({name: value for name, value in options.items() if name not in settings.set})
    profile = None
    command = f"tiermoe calibrate {model} --text FILE --for {composition.profile}"
    path = profile_path(store, composition.profile)
    if composition.needs_profile:
        profile = read_profile(path, fingerprint, command)
        composition = filled(composition, profile)
        asked = given.get("quantizer")
        if asked is not None and asked != composition.quantizer:
            raise ProfileError(
                f"the bitwidths of {settings.preset} were found for {composition.quantizer}, not for {asked}; "
                f"calibrate with --bitwidth-quantizer {asked}, or leave quantizer out"
            )
    elif composition.profile:
        composition = _refined(composition, given, path, fingerprint, command)
    require_settings(composition, model)
    composition = with_low_share(composition, layers)
    settings = replace(
        settings,
        bits=composition.bits or settings.bits_used,
        dense_bits=composition.dense_bits,
        quantizer=composition.quantizer,
    )
    found = tables(profile)
    return Resolved(settings, composition, found, precisions(composition, settings.bits_used, found.bits))


def _refined(
    composition: Composition, given: Mapping[str, Any], path: Path, fingerprint: str, command: str
) -> Composition:
    """A composition that has a value for everything, with those that a calibration has found, if there is one, in the
    place of the preset's; what was asked for stays."""
    if not path.exists():
        return composition
    found = read_profile(path, fingerprint, command).settings
    left = {name: value for name, value in found.items() if name not in given}
    return changed(composition, {name: value for name, value in left.items() if unread(name, composition) is None})
