"""EdgeMoE's eviction score (section 3.3.3)."""

from __future__ import annotations

import math
from collections import Counter

from tiermoe.decide.eviction.protocol import EvictionContext
from tiermoe.decide.eviction.ranking import Scored
from tiermoe.types import Demand, ExpertKey


class DistanceByFrequency(Scored):
    """Evicts the highest ((i - I) mod S) / f over the S layers of the decoder: far ahead and rarely used.

    f is `context.frequencies` (0 where not given) and the uses since, one for each token served. Where f is 0 the score
    is infinite, and so it is for every expert of an encoder, which a request uses once. Of equal scores, fewer uses go
    first. While an encoder runs, the decoder is about to begin: I is its first layer. An encoder alone has no decoder
    whose experts are wanted sooner, and the next request runs it again: the S layers are its own, and its uses count.
    """

    def __init__(self, context: EvictionContext) -> None:
        super().__init__(context)
        self._clock = context.clock
        self._first = context.encoder_layers if context.encoder_layers < context.layers else 0
        self._layers = context.layers - self._first
        self._prior = context.frequencies
        self._uses: Counter[ExpertKey] = Counter()

    def record(self, key: ExpertKey, demand: Demand) -> None:
        self._uses[key] += demand.tokens

    def forget(self) -> None:
        self._uses.clear()

    def worth(self, key: ExpertKey) -> float:
        if key.layer < self._first:
            return 0.0
        return self._prior.get((key.layer, key.expert), 0.0) + self._uses[key]

    def score(self, layer: int, worth: float) -> float:
        if worth == 0:
            return -math.inf
        distance = (layer - max(self._clock.layer, self._first)) % self._layers
        return -distance / worth
