"""A preset made ready for one model: `--set` applied, open settings filled from its calibration profile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tiermoe.config import Settings
from tiermoe.decide.compose import Tables, filled, precisions, require_settings, tables
from tiermoe.decide.composition import Composition, changed, unread
from tiermoe.decide.profiles import profile_path, read_profile
from tiermoe.errors import ConfigError, ProfileError
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
    _require_its_bits(composition, settings)
    profile = None
    command = f"tiermoe calibrate {model} --text FILE --for {composition.profile}"
    path = profile_path(store, composition.profile)
    if composition.needs_profile:
        profile = read_profile(path, fingerprint, command)
        asked = composition.quantizer if "quantizer" in settings.set else None
        composition = filled(composition, profile)
        if asked is not None and asked != composition.quantizer:
            raise ProfileError(
                f"the bitwidths of {settings.preset} were found for {composition.quantizer}, not for {asked}; "
                f"calibrate with --bitwidth-quantizer {asked}, or leave quantizer out"
            )
    elif composition.profile:
        composition = _refined(composition, settings, path, fingerprint, command)
    require_settings(composition, model)
    settings = replace(
        settings,
        bits=composition.bits or settings.bits_used,
        dense_bits=composition.dense_bits or settings.dense_bits,
        quantizer=composition.quantizer or settings.quantizer,
    )
    found = tables(profile)
    return Resolved(settings, composition, found, precisions(composition, settings.bits_used, found.bits))


def _require_its_bits(composition: Composition, settings: Settings) -> None:
    """ConfigError where a composition has a precision of its own and the engine's option names another."""
    if composition.bits is not None and settings.bits not in (None, composition.bits):
        raise ConfigError(
            f"the preset {settings.preset} has its experts at {composition.bits} bits, and --bits asks for "
            f"{settings.bits}; leave --bits out, or use --set bits={settings.bits} in its place"
        )


def _refined(composition: Composition, settings: Settings, path: Path, fingerprint: str, command: str) -> Composition:
    """A composition that has a value for everything, with those that a calibration has found, if there is one, in the
    place of the preset's; what was asked for stays."""
    if not path.exists():
        return composition
    found = read_profile(path, fingerprint, command).settings
    left = {name: value for name, value in found.items() if name not in settings.set}
    return changed(composition, {name: value for name, value in left.items() if unread(name, composition) is None})
