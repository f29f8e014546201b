"""Later layers' routers on the running layer's input: the top K of each, or a walk to the first that lacks one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from tiermoe.decide.prediction.protocol import Forecasts, Here, LooksAhead
from tiermoe.types import Wanted


class NextGate(LooksAhead):
    """The top K of each of the next `ahead` layers (mixtral-offload: Eliseev and Mazur 2023, section 3.2; CORM's first
    level). Of several tokens, as many as their choices can name together, by summed weight."""

    asks_routers: ClassVar[bool] = True

    def candidates(self, layer: int, forecasts: Forecasts, here: Here) -> Iterator[Wanted]:
        if layer < 0:
            return
        for target in self.targets(layer):
            yield from self.predicted(target, forecasts)

    def predicted(self, target: int, forecasts: Forecasts) -> list[Wanted]:
        """The experts that layer `target`'s router would choose, likeliest first."""
        count = self.most(self.context.top_k[target])
        return [Wanted(target, expert, weight) for expert, weight in forecasts.ranked(target)[:count]]


class StackedGates(NextGate):
    """Walks the next `ahead` layers: one whose predicted experts are all here is named, so that they are kept, and
    passed; the first that lacks one is named and ends the walk (HOBBIT, layer-level adaptive prefetch)."""

    in_one_product: ClassVar[bool] = True

    def candidates(self, layer: int, forecasts: Forecasts, here: Here) -> Iterator[Wanted]:
        if layer < 0:
            return
        for target in self.targets(layer):
            predicted = self.predicted(target, forecasts)
            # asked before anything is named: naming a missing expert may start its load
            all_here = all(here(target, wanted.expert) for wanted in predicted)
            yield from predicted
            if not all_here:
                return
