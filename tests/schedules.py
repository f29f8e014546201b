"""A composition's scheduler over a fake link, and forecasts that a test writes down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fake_link import FakeLink
from groups import each
from tiermoe.decide.compose import ModelShape, PrecisionSlots, assemble
from tiermoe.decide.misses import MissCosts
from tiermoe.decide.scheduler import Scheduler
from tiermoe.systems import compose
from tiermoe.types import ExpertKey, Ready, Routed

SHAPE = ModelShape(experts=[4, 4, 4], top_k=[2, 2, 2])
HOBBIT = {"t1": 0.6, "t2": 0.9, "weights": "0.25,0.25,0.25,0.25", "prefetch": "none"}


class Said:
    """Forecasts that a test writes down: layer → [(expert, weight)]."""

    def __init__(self, ranked: dict[int, list[tuple[int, float]]] | None = None, **recalled: Any) -> None:
        self._ranked = ranked or {}
        self._recalled: dict[int, list[tuple[int, float]]] = recalled.get("recalled", {})

    def ranked(self, target: int) -> Sequence[tuple[int, float]]:
        return self._ranked.get(target, ())

    def counted(self, target: int) -> Sequence[tuple[int, float]]:
        return ()

    def recalled(self, target: int) -> Sequence[tuple[int, float]]:
        return self._recalled.get(target, ())

    def token_ids(self) -> Sequence[int]:
        return ()


def scheduler_with(
    name: str,
    slots: int = 6,
    bits: tuple[int, ...] = (4,),
    miss_costs: Callable[[], MissCosts] | None = None,
    **changes: Any,
) -> tuple[Scheduler, FakeLink]:
    link = FakeLink()
    composition = compose(name, changes)
    runs = [PrecisionSlots(bits, slots)]
    if composition.low_share:
        runs = [PrecisionSlots((bits[0],), slots), PrecisionSlots(bits[1:], 3)]
    return assemble(composition, SHAPE, runs, link, bits[0], miss_costs=miss_costs), link


def run(
    scheduler: Scheduler, layer: int, experts: list[int], weights: list[float], said: Said | None = None
) -> list[Ready]:
    routed = Routed(layer, "decode", [experts], [weights])
    return sorted(each(scheduler.run_layer(routed, said or Said())))


def keys(link: FakeLink, urgent: bool) -> list[ExpertKey]:
    return [load.key for load in link.submitted if load.urgent is urgent]
