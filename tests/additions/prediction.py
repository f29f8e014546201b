"""Predictors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from tiermoe.policy.prediction import Forecasts, Here, PredictionContext
from tiermoe.policy.prediction.base import Predictor
from tiermoe.types import Routed, Wanted


class SameAgain(Predictor):
    """What the next layers chose in the last pass."""

    def __init__(self, context: PredictionContext) -> None:
        super().__init__(context)
        self._last: dict[int, dict[int, int]] = {}

    def observe(self, routed: Routed) -> None:
        super().observe(routed)
        self._last[routed.layer] = routed.tokens_per_expert()

    def candidates(self, layer: int, forecasts: Forecasts, here: Here) -> Iterator[Wanted]:
        for target in self.context.targets(layer):
            for expert, tokens in self._last.get(target, {}).items():
                yield Wanted(target, expert, tokens)


class LikeliestExpert(Predictor):
    """The one expert that the router of each of the next layers ranks first."""

    asks_routers: ClassVar[bool] = True

    def candidates(self, layer: int, forecasts: Forecasts, here: Here) -> Iterator[Wanted]:
        for target in self.context.targets(layer):
            for expert, weight in forecasts.ranked(target)[:1]:
                yield Wanted(target, expert, weight)
