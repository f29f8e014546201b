"""MoE-Infinity's eviction: the activation ratio of the running request, and the depth of the layer."""

from __future__ import annotations

from collections import Counter

from tiermoe.offload.policies.eviction.base import EvictionContext
from tiermoe.offload.policies.eviction.classic import LeastFrequentlyUsed
from tiermoe.types import Demand, ExpertKey

_EPSILON = 1e-8  # orders the experts that were not used by their layers


class ActivationRatio(LeastFrequentlyUsed):
    """Evicts the lowest (a + epsilon) (1 - l / L): a is the share of the uses of layer l that the expert served (a row
    of the request's activation matrix, scaled to the sum 1), L the number of MoE layers. Early layers stay, since less
    time passes in which they could be read ahead. With records=sequence, which the paper has, uses are the request's.
    """

    def __init__(self, context: EvictionContext) -> None:
        super().__init__(context)
        self._layer_uses: Counter[int] = Counter()
        self._depth = [1 - layer / context.layers for layer in range(context.layers)]  # 1 - l / L
        self._scale = list(self._depth)  # the same divided by the layer's uses

    def record(self, key: ExpertKey, demand: Demand) -> None:
        super().record(key, demand)
        layer = key.layer
        self._layer_uses[layer] += demand.tokens
        self._scale[layer] = self._depth[layer] / max(self._layer_uses[layer], 1)

    def forget(self) -> None:
        super().forget()
        self._layer_uses.clear()
        self._scale[:] = self._depth

    def priority(self, layer: int, score: float) -> float:
        return score * self._scale[layer] + _EPSILON * self._depth[layer]
