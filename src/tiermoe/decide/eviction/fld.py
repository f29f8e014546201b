"""Farthest layer distance (the fourth term of HOBBIT's priority, section 3.4)."""

from __future__ import annotations

from typing import ClassVar

from tiermoe.decide.eviction.protocol import EvictionContext
from tiermoe.decide.eviction.ranking import Scored
from tiermoe.types import Demand, ExpertKey


class FarthestLayer(Scored):
    """Evicts from the layer that runs last from now on; within it, the least recently used."""

    forgets: ClassVar[bool] = False

    def __init__(self, context: EvictionContext) -> None:
        super().__init__(context)
        self._clock = context.clock
        self._layers = context.layers

    def record(self, key: ExpertKey, demand: Demand) -> None:
        """Uses count by their order alone."""

    def forget(self) -> None:
        """Nothing is recorded."""

    def worth(self, key: ExpertKey) -> float:
        return 0.0

    def score(self, layer: int, worth: float) -> float:
        """1 - ((l_t - l_i + l_n) mod l_n) / l_n"""
        return 1 - (layer - self._clock.layer) % self._layers / self._layers
