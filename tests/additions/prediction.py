"""Predictors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tiermoe.offload.policies.prediction import Available, Forecasts, LooksAhead
from tiermoe.offload.policies.settings import setting
from tiermoe.types import Routed, Wanted


@dataclass(eq=False)
class SameAgain(LooksAhead):
    """What the next layers chose in the last pass for at least `least` tokens."""

    least: int = setting(1, read=int, low=1, high=1024)

    def __post_init__(self) -> None:
        self._last: dict[int, dict[int, int]] = {}

    def observe(self, routed: Routed) -> None:
        super().observe(routed)
        self._last[routed.layer] = routed.tokens_per_expert()

    def candidates(self, layer: int, forecasts: Forecasts, available: Available) -> Iterator[Wanted]:
        for target in self.targets(layer):
            for expert, tokens in self._last.get(target, {}).items():
                if tokens >= self.least:
                    yield Wanted(target, expert, tokens)


class LikeliestExpert(LooksAhead):
    """The one expert that the router of each of the next layers ranks first."""

    asks_routers: ClassVar[bool] = True

    def candidates(self, layer: int, forecasts: Forecasts, available: Available) -> Iterator[Wanted]:
        for target in self.targets(layer):
            for expert, weight in forecasts.ranked(target)[:1]:
                yield Wanted(target, expert, weight)
