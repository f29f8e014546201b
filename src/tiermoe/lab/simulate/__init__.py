"""Replays of routing traces on a virtual clock and link, through the decisions that the engine takes."""

from tiermoe.lab.simulate.costs import run_bits, spread
from tiermoe.lab.simulate.evictions import EvictionRow, all_evictions, compare_evictions
from tiermoe.lab.simulate.machines import MACHINES, Machine, machine_of, parse_link, traced_machine
from tiermoe.lab.simulate.replay import BeladyHits, ReplaySettings, Result, replay, settings_on
from tiermoe.offload.computers import LINKS, NamedLink

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
    "traced_machine",
]
