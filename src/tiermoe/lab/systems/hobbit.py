"""HOBBIT: its preset; thresholds from the distribution of unimportance scores. `hobbit_weights` has its cache's
weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiermoe.lab.systems.ladder import Ladder
from tiermoe.lab.systems.routings import decode_passes
from tiermoe.offload.composition import Composition
from tiermoe.offload.policies.precision import thresholds, unimportance

if TYPE_CHECKING:
    from tiermoe.lab.trace.file import Trace

PRESET = Composition(
    "hobbit",
    "low precision or none for unimportant misses, stacked gates, a weighted cache in two pools",
    "HOBBIT, mixed-precision expert loading (2024)",
    precision="gate-score", prefetch="stacked-gates", cache="weighted", records="sequence", start="together",
    profile="hobbit", low_share=0.2, own={"ahead": 3},
)  # fmt: skip

LADDER = Ladder(
    "LRU, one precision",
    (
        ("dynamic loading", {"precision": "fixed", "low_share": 0}),
        ("prefetch", {"prefetch": "none"}),
        ("weighted cache", {"cache": "lru"}),
    ),
)
"""In the order of section 5.5, which measures each mechanism by itself."""


HIGH_SHARE, SKIP_SHARE = 0.67, 0.03
"""Shares of the scores that are high and skipped, as with the paper's thresholds in Mixtral (section 3.2: 67 % high,
30 % low, 3 % skipped)."""


def scores(trace: Trace) -> list[float]:
    """The unimportance of every expert of every decoded token."""
    return [
        score
        for passed in decode_passes(trace)
        for layer in passed.layers
        for gates in layer.weights
        for score in unimportance(gates)
    ]


def thresholds_of(trace: Trace, high_share: float = HIGH_SHARE, skip_share: float = SKIP_SHARE) -> tuple[float, float]:
    """(t1, t2) that split the trace's scores. With one expert per token all are 0 and high."""
    return thresholds(scores(trace), high_share, skip_share)


@dataclass(frozen=True, slots=True)
class Split:
    """Shares of the scores that two thresholds make."""

    high: float
    low: float
    skipped: float

    @staticmethod
    def of(trace: Trace, t1: float, t2: float) -> Split:
        found = scores(trace)
        high = sum(score <= t1 for score in found) / len(found)
        skipped = sum(score > t2 for score in found) / len(found)
        return Split(high, 1 - high - skipped, skipped)
