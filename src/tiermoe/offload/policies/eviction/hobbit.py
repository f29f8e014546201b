"""HOBBIT's eviction (section 3.4): the weighted priority of equation 3, and two of its terms as policies of their own.
The other two terms are `lru` and `lfu`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from tiermoe.offload.policies.eviction.base import EvictionContext, ScoredEviction
from tiermoe.offload.policies.eviction.classic import LeastFrequentlyUsed
from tiermoe.offload.policies.settings import setting
from tiermoe.types import Demand, ExpertKey


class LeastHighPrecisionUsed(LeastFrequentlyUsed):
    """LFU that counts only uses that asked for at least `context.high_bits`: a miss of those costs most."""

    def __init__(self, context: EvictionContext) -> None:
        super().__init__(context)
        self._high_bits = context.high_bits

    def record(self, key: ExpertKey, demand: Demand) -> None:
        if demand.bits >= self._high_bits:
            super().record(key, demand)


class FarthestLayer(ScoredEviction):
    """Evicts from the layer that runs last from now on; within a layer, the least recently used."""

    forgets: ClassVar[bool] = False

    def __init__(self, context: EvictionContext) -> None:
        super().__init__(context)
        self._clock = context.clock
        self._layers = context.layers

    def record(self, key: ExpertKey, demand: Demand) -> None:
        """Uses count by their order alone."""

    def forget(self) -> None:
        """Nothing is recorded."""

    def score(self, key: ExpertKey) -> float:
        return 0.0

    def priority(self, layer: int, score: float) -> float:
        """1 - ((l_t - l_i + l_n) mod l_n) / l_n"""
        return 1 - (layer - self._clock.layer) % self._layers / self._layers


def _weights(given: Any) -> tuple[float, float, float, float]:
    a, b, c, d = (float(number) for number in (given.split(",") if isinstance(given, str) else given))
    if min(a, b, c, d) < 0 or abs(a + b + c + d - 1) > 1e-3:
        raise ValueError
    return a, b, c, d


@dataclass(eq=False)
class Weighted(ScoredEviction):
    """Evicts the lowest p_t = w_lru R/T + w_lfu F/T + w_lhu H/T + w_fld (1 - ((l_t - l_i + l_n) mod l_n) / l_n).

    R is the token index of the last use, F the uses of the expert in any precision, H the uses of this copy that asked
    for high precision, T the current token index. A use counts once for each token that it served, so F/T is at most 1.
    R and T count the tokens of this sequence if records are kept per sequence, else of all sequences (up to the last
    use in each).

    F spans the precisions, whose pools share one instance: `evictable` keeps each pool to its own keys.
    """

    context: EvictionContext
    # w_lru, w_lfu, w_lhu, w_fld, of sum 1
    weights: tuple[float, float, float, float] = setting(
        (0.25, 0.25, 0.25, 0.25), read=_weights, kind="four numbers that sum to 1, like 0.4,0.3,0.2,0.1",
        calibrated=True,
    )  # fmt: skip
    spans_precisions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        context = self.context
        super().__init__(context)
        self._clock = context.clock
        self._layers = context.layers
        self._high_bits = context.high_bits
        self._w_lru, self._w_lfu, self._w_lhu, self._w_fld = self.weights
        self._last_use: dict[ExpertKey, int] = {}
        self._uses: Counter[tuple[int, int]] = Counter()  # of (layer, expert)
        self._high_uses: Counter[ExpertKey] = Counter()
        self._bits: set[int] = set()  # of all copies that were ever cached
        self._earlier_tokens = 0
        self._seen_tokens = 0

    def admitted(self, key: ExpertKey) -> None:
        self._bits.add(key.bits)
        super().admitted(key)

    def record(self, key: ExpertKey, demand: Demand) -> None:
        token = self._seen_tokens = self._clock.token
        self._last_use[key] = self._earlier_tokens + token
        self._uses[key.layer, key.expert] += demand.tokens
        if demand.bits >= self._high_bits:
            self._high_uses[key] += demand.tokens
        for bits in self._bits if len(self._bits) > 1 else ():
            if bits != key.bits and (copy := ExpertKey(key.layer, key.expert, bits)) in self._entries:
                self.rescore(copy)

    def forget(self) -> None:
        self._last_use.clear()
        self._uses.clear()
        self._high_uses.clear()

    def new_sequence(self) -> None:
        super().new_sequence()
        if not self._per_sequence:
            # the clock starts again at each sequence and may have done so already
            self._earlier_tokens += self._seen_tokens
        self._seen_tokens = 0

    def score(self, key: ExpertKey) -> float:
        """The first three terms times T."""
        recency = self._w_lru * self._last_use.get(key, 0)
        frequency = self._w_lfu * self._uses[key.layer, key.expert]
        return recency + frequency + self._w_lhu * self._high_uses[key]

    def priority(self, layer: int, score: float) -> float:
        nearness = 1 - (layer - self._clock.layer) % self._layers / self._layers
        return score / max(self._now(), 1) + self._w_fld * nearness

    def _now(self) -> int:
        return self._earlier_tokens + self._clock.token
