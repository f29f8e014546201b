"""EdgeMoE's eviction (section 3.3.3): distance in layers divided by frequency."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiermoe.offload.policies.eviction.base import EvictionContext
from tiermoe.offload.policies.eviction.classic import LeastFrequentlyUsed
from tiermoe.offload.policies.settings import setting
from tiermoe.types import ExpertKey


@dataclass(eq=False)
class DistanceByFrequency(LeastFrequentlyUsed):
    """Evicts the highest d / f over the S layers of the decoder: far away and rarely used.

    d is ((i - I) mod S), the layers until layer i runs, or with distance='behind' ((S - i + I) mod S), those since it
    ran: the paper's text asks for the first, the formula that it prints has the second.

    f is `context.frequencies` (0 for an expert that it lacks) plus the uses since, one for each token served. Where f
    is 0 the quotient is infinite. Of equal quotients the expert with fewer uses leaves first.

    Experts of an encoder leave before all others: a request uses them once. While an encoder runs, I is the decoder's
    first layer, which runs next. A model that is an encoder alone runs again for the next request: the S layers are
    the encoder's, and its uses count.
    """

    context: EvictionContext
    distance: str = setting("ahead", read=str, one_of=("ahead", "behind"))

    def __post_init__(self) -> None:
        context = self.context
        super().__init__(context)
        self._clock = context.clock
        self._first = context.encoder_layers if context.encoder_layers < context.layers else 0
        self._layers = context.layers - self._first
        self._prior = context.frequencies

    def score(self, key: ExpertKey) -> float:
        """f"""
        if key.layer < self._first:
            return 0.0
        return self._prior.get((key.layer, key.expert), 0.0) + super().score(key)

    def priority(self, layer: int, score: float) -> float:
        if score == 0:
            return -math.inf
        ahead = layer - max(self._clock.layer, self._first)
        return -((ahead if self.distance == "ahead" else -ahead) % self._layers) / score
