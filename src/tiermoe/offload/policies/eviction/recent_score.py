"""HybriMoE's eviction: minus recent score (MRS), an average of gate weights over the passes of a layer."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from tiermoe.offload.policies.eviction.base import EvictionContext, ScoredEviction
from tiermoe.offload.policies.eviction.decayed import log2_sum
from tiermoe.offload.policies.settings import setting
from tiermoe.types import Demand, ExpertKey, Routed


@dataclass(eq=False)
class MinusRecentScore(ScoredEviction):
    """Evicts the expert of the lowest S, which becomes alpha TopP(s) + (1 - alpha) S whenever its layer has routed a
    pass. s: the gate weights of all experts, of several tokens their mean; TopP keeps the largest and makes the others
    0. Here it keeps those of the K that a token uses, which is what routers hand out.

    All S of a layer decay by 1 - alpha in a pass. The score is log2 of S / (1 - alpha)^n after n passes of the layer,
    which decay leaves alone."""

    context: EvictionContext
    alpha: float = setting(0.1, low=0.001, high=0.999)  # weight of the newest pass
    spans_precisions: ClassVar[bool] = True
    reads_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__init__(self.context)
        self._decay = math.log2(1 - self.alpha)
        self._scores: dict[tuple[int, int], float] = {}  # of (layer, expert)
        self._passes: Counter[int] = Counter()  # of each layer
        self._bits: set[int] = set()  # of all copies that were ever cached

    def admitted(self, key: ExpertKey) -> None:
        self._bits.add(key.bits)
        super().admitted(key)

    def routed(self, routed: Routed) -> None:
        """A layer's router has chosen for the tokens of a pass."""
        layer = routed.layer
        self._passes[layer] += 1
        scale = math.log2(self.alpha / len(routed.experts)) - self._passes[layer] * self._decay
        weights: dict[int, float] = {}
        for chosen, gates in zip(routed.experts, routed.weights, strict=True):
            for expert, gate in zip(chosen, gates, strict=True):
                weights[expert] = weights.get(expert, 0.0) + gate
        for expert, weight in weights.items():
            if weight > 0:
                added, before = scale + math.log2(weight), self._scores.get((layer, expert))
                self._scores[layer, expert] = added if before is None else log2_sum(before, added)
                for bits in self._bits:
                    if (key := ExpertKey(layer, expert, bits)) in self._entries:
                        self.rescore(key)

    def record(self, key: ExpertKey, demand: Demand) -> None:
        """What counts is the router's choice."""

    def forget(self) -> None:
        self._scores.clear()
        self._passes.clear()

    def score(self, key: ExpertKey) -> float:
        return self._scores.get((key.layer, key.expert), -math.inf)

    def priority(self, layer: int, score: float) -> float:
        return score + self._passes[layer] * self._decay
