"""A precision rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tiermoe.offload.policies.precision import HighAndLow
from tiermoe.offload.policies.settings import setting
from tiermoe.types import Demand, Routed


@dataclass(eq=False)
class FirstHigh(HighAndLow):
    """High for an expert that some token ranks among its `first`, low for the others."""

    first: int = setting(1, read=int, low=1, high=64)
    reads_forecasts: ClassVar[bool] = True

    def demands(self, routed: Routed) -> list[Demand]:
        first = {expert for chosen in routed.experts for expert in chosen[: self.first]}
        counts = routed.tokens_per_expert()
        return [Demand(expert, counts[expert], self._bits(expert in first)) for expert in counts]

    def predicted(self, layer: int, ranked: Sequence[tuple[int, float]], expert: int) -> int:
        return self._bits(not ranked or expert in [first for first, _ in ranked[: self.first]])

    def _bits(self, high: bool) -> int:
        return self.context.bits if high else self.low_bits
