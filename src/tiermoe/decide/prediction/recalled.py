"""What the routers said of the same position in the discarded little pass, alone or beside the next gates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from tiermoe.decide.prediction.gates import NextGate
from tiermoe.decide.prediction.protocol import Forecasts, Here, LooksAhead
from tiermoe.decide.routing import little_k
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


class RecalledAndNextGate(NextGate):
    """Both at once (MoBiLE, "with pre-gating"): a fallback pass recalls, from before its first layer on; any other
    pass, the little one too, is predicted by the next gates. Of a little pass these name as many experts as it runs."""

    def candidates(self, layer: int, forecasts: Forecasts, here: Here) -> Iterator[Wanted]:
        for target in self.targets(layer):
            known = forecasts.recalled(target)
            if not known and layer < 0:
                continue
            ranked = known or forecasts.ranked(target)
            each = self.context.top_k[target]
            if not known and self.phase == "decode":
                each = little_k(each, self.context.little)
            for expert, weight in ranked[: self.most(each)]:
                yield Wanted(target, expert, weight)
