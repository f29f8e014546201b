"""Least frequently used."""

from __future__ import annotations

from collections import Counter

from tiermoe.offload.policies.eviction.base import EvictionContext, ScoredEviction
from tiermoe.types import Demand, ExpertKey


class LeastFrequentlyUsed(ScoredEviction):
    """Evicts the expert with the fewest uses, one for each token that it served; of those, the least recently used."""

    def __init__(self, context: EvictionContext) -> None:
        super().__init__(context)
        self._uses: Counter[ExpertKey] = Counter()

    def record(self, key: ExpertKey, demand: Demand) -> None:
        self._uses[key] += demand.tokens

    def forget(self) -> None:
        self._uses.clear()

    def score(self, key: ExpertKey) -> float:
        return self._uses[key]

    def priority(self, layer: int, score: float) -> float:
        return score
