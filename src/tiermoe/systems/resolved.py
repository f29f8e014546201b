"""A preset made ready for one model: `--set` applied, open settings filled from its calibration profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiermoe.config import Settings
from tiermoe.errors import ProfileError
from tiermoe.offload.assembly import precisions
from tiermoe.offload.composition import Composition, changed, filled, require_settings, unread, with_low_share
from tiermoe.offload.profiles import Tables, profile_path, read_profile, tables
from tiermoe.systems import compose

OPTIONS = ("bits", "dense_bits", "quantizer")
"""Options of the engine that a preset may set. The user's values take precedence."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A preset made ready for a model."""

    settings: Settings  # of the engine, with the composition's `OPTIONS`
    composition: Composition
    tables: Tables  # of the calibration
    precisions: tuple[int, ...]  # bits that experts are loaded in, highest first


def resolve(settings: Settings, store: Path, fingerprint: str, model: str, layers: int) -> Resolved:
    """Makes the preset of `settings` ready for a model of `layers` MoE layers. store: folder of the model's store, with
    the profiles. ConfigError for an unknown preset, part or value; ProfileError where a profile is needed and cannot be
    used."""
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
    """A complete composition with the values that a calibration has found, if there is one, instead of the preset's;
    given values stay."""
    if not path.exists():
        return composition
    found = read_profile(path, fingerprint, command).settings
    left = {name: value for name, value in found.items() if name not in given}
    return changed(composition, {name: value for name, value in left.items() if unread(name, composition) is None})
