"""Replays of routing traces on a virtual clock and link, through the decisions that the engine takes."""

from tiermoe.simulate.costs import spread
from tiermoe.simulate.evictions import EvictionRow, all_evictions, compare_evictions
from tiermoe.simulate.machines import LINKS, NamedLink, parse_link
from tiermoe.simulate.replay import BeladyHits, ReplaySettings, Result, replay

__all__ = [
    "LINKS",
    "BeladyHits",
    "EvictionRow",
    "NamedLink",
    "ReplaySettings",
    "Result",
    "all_evictions",
    "compare_evictions",
    "parse_link",
    "replay",
    "spread",
]
