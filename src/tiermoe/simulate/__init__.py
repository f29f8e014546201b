"""Replays of routing traces on a virtual clock and link, through the decisions that the engine takes."""

from tiermoe.simulate.costs import MACHINES, Machine, parse_link, spread
from tiermoe.simulate.evictions import EvictionRow, all_evictions, compare_evictions
from tiermoe.simulate.replay import BeladyHits, ReplaySettings, replay
from tiermoe.simulate.result import Result

__all__ = [
    "MACHINES",
    "BeladyHits",
    "EvictionRow",
    "Machine",
    "ReplaySettings",
    "Result",
    "all_evictions",
    "compare_evictions",
    "parse_link",
    "replay",
    "spread",
]
