"""Five published systems, a file each: its preset, the ladder of its parts, and the arithmetic of its calibration."""

from __future__ import annotations

from tiermoe.lab.systems import corm, edgemoe, fate, hobbit, mobile
from tiermoe.lab.systems.ladder import DEFAULT_LADDER, Ladder

LADDERS: dict[str, Ladder] = {
    "default": DEFAULT_LADDER,
    **{system.PRESET.name: system.LADDER for system in (hobbit, edgemoe, mobile, fate, corm)},
}
"""Preset → its parts in the order in which they are switched on."""
