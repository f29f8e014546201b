"""Least high-precision used (HOBBIT, section 3.4)."""

from __future__ import annotations

from tiermoe.decide.eviction.lfu import LeastFrequentlyUsed
from tiermoe.decide.eviction.protocol import EvictionContext
from tiermoe.types import Demand, ExpertKey


class LeastHighPrecisionUsed(LeastFrequentlyUsed):
    """LFU that counts only the uses for which at least `context.high_bits` were asked: missing those costs most."""

    def __init__(self, context: EvictionContext) -> None:
        super().__init__(context)
        self._high_bits = context.high_bits

    def record(self, key: ExpertKey, demand: Demand) -> None:
        if demand.bits >= self._high_bits:
            super().record(key, demand)
