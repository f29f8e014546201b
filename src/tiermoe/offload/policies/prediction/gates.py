"""Predictors that ask later layers' routers on the running layer's input, or recall what routers said in a discarded
pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from tiermoe.offload.policies.prediction.base import Available, Forecasts, LayerByLayer, Ranked
from tiermoe.offload.policies.routing import little_k
from tiermoe.types import Wanted


class NextGate(LayerByLayer):
    """The top K of each of the next `ahead` layers (mixtral-offload: Eliseev and Mazur 2023, section 3.2; CORM's first
    level). For several tokens, as many experts as their choices can name together, by summed weight."""

    asks_routers: ClassVar[bool] = True

    def named(self, target: int, forecasts: Forecasts) -> Ranked:
        return forecasts.ranked(target)[: self.most(self.context.top_k[target])]


class StackedGates(NextGate):
    """A walk over the next `ahead` layers (HOBBIT, layer-level adaptive prefetch). A layer whose predicted experts are
    all available is named, which protects them, and passed; the first layer that lacks one is named and ends the
    walk."""

    in_one_product: ClassVar[bool] = True

    def candidates(self, layer: int, forecasts: Forecasts, available: Available) -> Iterator[Wanted]:
        for target in self.targets(layer) if layer >= 0 else ():
            predicted = forecasts.ranked(target)[: self.most(self.context.top_k[target])]
            # before anything is named: naming a missing expert may start its load
            all_available = all(available(target, expert) for expert, _ in predicted)
            for expert, weight in predicted:
                yield Wanted(target, expert, weight)
            if not all_available:
                return


class Recalled(LayerByLayer):
    """The top K of the next `ahead` layers by the evicted token's router states (MoBiLE, section III-B), from before
    the first layer on. Nothing in a pass that is no fallback."""

    asks_routers: ClassVar[bool] = True
    from_the_start: ClassVar[bool] = True

    def named(self, target: int, forecasts: Forecasts) -> Ranked:
        return forecasts.recalled(target)[: self.most(self.context.top_k[target])]


class RecalledAndNextGate(NextGate):
    """`Recalled` in fallback passes, from before the first layer on, and `NextGate` in all others (MoBiLE, "with
    pre-gating"). For a little pass the gates name as many experts as it runs."""

    def candidates(self, layer: int, forecasts: Forecasts, available: Available) -> Iterator[Wanted]:
        for target in self.targets(layer):
            recalled = forecasts.recalled(target)
            if not recalled and layer < 0:
                continue
            ranked = recalled or forecasts.ranked(target)
            each = self.context.top_k[target]
            if not recalled and self.phase == "decode":
                each = little_k(each, self.context.little)
            for expert, weight in ranked[: self.most(each)]:
                yield Wanted(target, expert, weight)
