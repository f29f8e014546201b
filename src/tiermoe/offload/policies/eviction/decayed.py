"""Eviction by exponentially decayed use counts (LRFU: Lee and others, 2001)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiermoe.offload.policies.eviction.base import EvictionContext, ScoredEviction
from tiermoe.offload.policies.settings import setting
from tiermoe.types import Demand, ExpertKey


def log2_sum(one: float, other: float) -> float:
    """log2(2^one + 2^other), without computing the powers: at least one is finite."""
    high, low = (one, other) if one >= other else (other, one)
    return high + math.log2(1 + 2 ** (low - high))


@dataclass(eq=False)
class DecayedCounts(ScoredEviction):
    """Evicts the expert of the lowest sum over its uses of 2^(-age / half_life), age in tokens; a use counts once for
    each token that it served. A half-life of a token is nearly LRU, one of all tokens LFU.

    All sums halve in the same time, so the order of the sums of 2^(token / half_life) is theirs at any time; the score
    is its logarithm."""

    context: EvictionContext
    half_life: float = setting(64.0, low=0.1, high=1e9)  # tokens in which a use loses half of its weight

    def __post_init__(self) -> None:
        super().__init__(self.context)
        self._clock = self.context.clock
        self._sums: dict[ExpertKey, float] = {}  # log2 of the sum
        self._earlier_tokens = 0  # of sequences before this one
        self._seen_tokens = 0  # of this one, up to the last use

    def record(self, key: ExpertKey, demand: Demand) -> None:
        token = self._seen_tokens = self._clock.token
        added = (self._earlier_tokens + token) / self.half_life + math.log2(max(demand.tokens, 1))
        before = self._sums.get(key)
        self._sums[key] = added if before is None else log2_sum(before, added)

    def forget(self) -> None:
        self._sums.clear()

    def new_sequence(self) -> None:
        super().new_sequence()
        self._earlier_tokens += self._seen_tokens
        self._seen_tokens = 0

    def score(self, key: ExpertKey) -> float:
        return self._sums.get(key, -math.inf)

    def priority(self, layer: int, score: float) -> float:
        return score
