"""What the routers said of the same position in the discarded little pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from tiermoe.decide.prediction.protocol import Forecasts, Here, LooksAhead
from tiermoe.types import Wanted


class Recalled(LooksAhead):
    """The top K of the next `ahead` layers by the evicted token's router states (MoBiLE, section III-B), from before
    the first layer on. Nothing in a pass that is no fallback."""

    asks_routers: ClassVar[bool] = True

    def candidates(self, layer: int, forecasts: Forecasts, here: Here) -> Iterator[Wanted]:
        for target in self.targets(layer):
            count = self.most(self.context.top_k[target])
            for expert, weight in forecasts.recalled(target)[:count]:
                yield Wanted(target, expert, weight)
