"""Hit rates on recorded routing, for models whose own routing nobody has seen yet.

Each recording: what the default preset hits without prefetch, by the share of the experts that the cache holds, in the
worst and the best 64 tokens of the recorded texts. Made by `python -m benchmarks.hit_rates TRACE...`."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recording:
    """Routing of a model with so many experts a layer, `top_k` a token. hits: (share of the experts in the cache,
    lowest, highest hit rate), by rising share."""

    model: str
    experts: int
    top_k: int
    hits: tuple[tuple[float, float, float], ...]


_OTHERS = (1.4, 0.7)
"""Times the odds of a miss that another model's routing may be away from the recorded ones: chosen by eye from hit
rates that a public project reports of gemma-4-26B-A4B, gpt-oss-120b and Qwen3.6-35B-A3B."""

# fmt: off
RECORDINGS = (
    Recording(
        "Qwen3-30B-A3B",
        128,
        6,
        (
            (0.05, 0.387, 0.406),
            (0.1, 0.582, 0.592),
            (0.2, 0.765, 0.786),
            (0.3, 0.872, 0.896),
            (0.4, 0.927, 0.951),
            (0.5, 0.950, 0.976),
            (0.6, 0.957, 0.984),
            (0.8, 0.958, 0.984),
        ),
    ),
    Recording(
        "stories-7m", 32, 4,
        (
            (0.05, 0.034, 0.077), (0.1, 0.091, 0.176), (0.2, 0.302, 0.354), (0.3, 0.388, 0.478), (0.4, 0.485, 0.594),
            (0.5, 0.577, 0.686), (0.6, 0.659, 0.772), (0.8, 0.841, 0.900),
        ),
    ),
)
# fmt: on


def hit_rates(experts: int, top_k: int, share: float) -> tuple[tuple[float, float], str]:
    """((lowest, highest) hit rate, whose routing it was) of the recording whose shape is nearest to layers of `experts`
    experts of which a token uses `top_k`, where `share` of all experts is in the cache; nobody's ('') where all are."""
    if share >= 1:
        return (1.0, 1.0), ""
    nearest = min(RECORDINGS, key=lambda each: _distance(each, experts, top_k))
    table = ((0.0, 0.0, 0.0), *nearest.hits, (1.0, 1.0, 1.0))
    above = max(1, bisect_left(table, (share,)))
    (left, *lower), (right, *upper) = table[above - 1], table[above]
    weight = (share - left) / (right - left)
    found = [a + (b - a) * weight for a, b in zip(lower, upper, strict=True)]
    low, high = (hits / (hits + (1 - hits) * factor) for hits, factor in zip(found, _OTHERS, strict=True))
    return (low, high), f"{nearest.model} ({nearest.experts} experts a layer, {nearest.top_k} a token)"


def _distance(recording: Recording, experts: int, top_k: int) -> float:
    return abs(math.log(recording.experts / experts)) + abs(math.log(recording.top_k / top_k))
