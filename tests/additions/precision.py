"""A precision rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tiermoe.policy.precision import PrecisionContext
from tiermoe.types import Demand, Routed


class FirstHigh:
    """High for an expert that some token ranks first, low for the others."""

    reads_forecasts: ClassVar[bool] = True

    def __init__(self, context: PrecisionContext) -> None:
        self._high, self._low = context.bits, context.low_bits

    def demands(self, routed: Routed) -> list[Demand]:
        first = {chosen[0] for chosen in routed.experts if chosen}
        counts = routed.tokens_per_expert()
        return [Demand(expert, counts[expert], self._high if expert in first else self._low) for expert in counts]

    def predicted(self, layer: int, ranked: Sequence[tuple[int, float]], expert: int) -> int:
        return self._high if not ranked or expert == ranked[0][0] else self._low
