"""Presets, which are named compositions: five published systems, a file each with the arithmetic of its calibration;
the baselines of their papers; and ours. `PRESETS` is the table; `compose` applies `--set` to a preset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiermoe.errors import ConfigError
from tiermoe.offload.composition import Composition, changed
from tiermoe.offload.policies.settings import near
from tiermoe.systems import corm, edgemoe, fate, hobbit, mobile
from tiermoe.systems.baselines import BASELINES
from tiermoe.systems.ladder import Ladder
from tiermoe.systems.ours import DEFAULT_LADDER, OURS

PRESETS: dict[str, Composition] = {
    preset.name: preset
    for preset in (*OURS, hobbit.PRESET, edgemoe.PRESET, mobile.PRESET, fate.PRESET, corm.PRESET, *BASELINES)
}

LADDERS: dict[str, Ladder] = {
    "default": DEFAULT_LADDER,
    **{system.PRESET.name: system.LADDER for system in (hobbit, edgemoe, mobile, fate, corm)},
}
"""Preset → its parts in the order in which they are switched on."""


def preset_named(name: str) -> Composition:
    """ConfigError names the near ones where there is none of that name."""
    if name in PRESETS:
        return PRESETS[name]
    raise ConfigError(f"unknown preset '{name}'{near(name, PRESETS)}")


def compose(name: str, changes: Mapping[str, Any] | None = None) -> Composition:
    """A preset with parts and settings replaced. ConfigError for an unknown preset, and as `changed` raises it."""
    return changed(preset_named(name), changes)
