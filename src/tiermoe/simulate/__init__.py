"""Replays of routing traces on a virtual clock and link, through the decisions that the engine takes."""

from tiermoe.simulate.costs import run_bits, spread
from tiermoe.simulate.evictions import EvictionRow, all_evictions, compare_evictions
from tiermoe.simulate.machines import LINKS, MACHINES, Machine, NamedLink, machine_of, parse_link
from tiermoe.simulate.replay import BeladyHits, ReplaySettings, Result, replay, settings_on

__all__ = [
    "LINKS",
    "MACHINES",
    "BeladyHits",
    "EvictionRow",
    "Machine",
    "NamedLink",
    "ReplaySettings",
    "Result",
    "all_evictions",
    "compare_evictions",
    "machine_of",
    "parse_link",
    "replay",
    "run_bits",
    "settings_on",
    "spread",
]
