"""A scheduler, a loader and a cache over a link that finishes loads in any order and may fail: no weights, no files."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from tiermoe.errors import LoadError
from tiermoe.offload.assembly import ModelShape, PrecisionSlots, assemble
from tiermoe.offload.cache import ExpertCache
from tiermoe.offload.link import Finished
from tiermoe.offload.loader import ExpertLoader
from tiermoe.offload.policies.allotment import Pool
from tiermoe.offload.policies.eviction import EVICTIONS, Clock, Eviction, EvictionContext
from tiermoe.offload.policies.routing import MissCosts
from tiermoe.offload.presets import compose
from tiermoe.offload.scheduler import Scheduler
from tiermoe.types import Demand, ExpertKey, Load, Ready, Routed

LAYERS = 16


def lru(slots: int) -> Eviction:
    return EVICTIONS["lru"](EvictionContext(Clock(), slots, LAYERS))


def lru_of(pools: Sequence[Pool]) -> list[Eviction]:
    return [lru(pool.slots) for pool in pools]


def one_pool(slots: int, eviction: Eviction) -> ExpertCache:
    """One pool for all layers and precisions under a policy of its own."""
    return ExpertCache([Pool(slots, None, range(LAYERS))], lambda _: [eviction], (16, 8, 4, 3, 2))


def pools(slots: int, precisions: Sequence[int] = (4,)) -> ExpertCache:
    """One pool for all layers and precisions."""
    return ExpertCache([Pool(slots, None, range(LAYERS))], lru_of, precisions)


class FakeLink:
    """Finishes one load a time step, in random order; keeps what each slot holds, like a disk would fill it."""

    def __init__(self, seed: int = 0, failing: frozenset[ExpertKey] = frozenset()) -> None:
        self.contents: dict[int, ExpertKey] = {}
        self.submitted: list[Load] = []
        self.failing = failing
        self.time = 0.0
        self._random = random.Random(seed)
        self.urgent: list[Load] = []
        self.speculative: list[Load] = []
        self.background: list[Load] = []
        self.running: list[Load] = []
        self.finished: deque[Finished] = deque()

    def submit(self, load: Load) -> None:
        self.submitted.append(load)
        queue = self.background if load.background else self.urgent if load.urgent else self.speculative
        queue.append(load)

    def step(self) -> None:
        """One transfer ends, chosen at random among what lanes could be running."""
        if self.urgent and self._random.random() < 0.7:
            self.running.append(self.urgent.pop(0))
        elif self.speculative and not self.urgent:
            self.running.append(self.speculative.pop(0))
        elif self.urgent:
            self.running.append(self.urgent.pop(0))
        elif self.background and self._random.random() < 0.8:
            self.running.append(self.background.pop(0))
        if self.running:
            load = self.running.pop(self._random.randrange(len(self.running)))
            self.contents[load.slot] = load.key
            error = LoadError(f"{load.key} is damaged") if load.key in self.failing else None
            self.finished.append(Finished(load, error))

    def wait(self) -> Finished:
        for _ in range(1000):
            if self.finished:
                return self.finished.popleft()
            self.step()
        raise AssertionError("waited for a load that nobody asked for")

    def poll(self) -> Finished | None:
        if self._random.random() < 0.5:
            self.step()
        return self.finished.popleft() if self.finished else None

    def recall(self) -> list[Load]:
        loads, self.speculative = self.speculative, []
        return loads

    def withdraw(self, key: ExpertKey) -> bool:
        before = len(self.background)
        self.background = [load for load in self.background if load.key != key]
        return len(self.background) < before

    def roll_back(self) -> None:
        for loads in (self.urgent, self.speculative, self.background, self.running, self.finished):
            loads.clear()

    def now(self) -> float:
        return self.time


def controller_with(slots: int, **link: object) -> tuple[ExpertLoader, FakeLink]:
    fake = FakeLink(**link)  # type: ignore[arg-type]
    return ExpertLoader(pools(slots), fake), fake


def demands(*experts: int) -> list[Demand]:
    return [Demand(expert, 1, 4) for expert in experts]


def each(run: Iterable[list[Ready]]) -> Iterator[Ready]:
    """Asks for the next group once all of one are taken."""
    return chain.from_iterable(run)


SHAPE = ModelShape(experts=[4, 4, 4], top_k=[2, 2, 2])


HOBBIT = {"t1": 0.6, "t2": 0.9, "weights": "0.25,0.25,0.25,0.25", "prefetch": "none"}


Weights = Mapping[int, Sequence[tuple[int, float]]]


class Said:
    """Forecasts that a test writes down: layer → [(expert, weight)]; the tokens of the pass."""

    def __init__(
        self,
        ranked: Weights | None = None,
        recalled: Weights | None = None,
        counted: Weights | None = None,
        tokens: Sequence[int] = (),
    ) -> None:
        self._ranked, self._recalled, self._counted = ranked or {}, recalled or {}, counted or {}
        self._tokens = tokens

    def ranked(self, target: int) -> Sequence[tuple[int, float]]:
        return self._ranked.get(target, ())

    def counted(self, target: int) -> Sequence[tuple[int, float]]:
        return self._counted.get(target, ())

    def recalled(self, target: int) -> Sequence[tuple[int, float]]:
        return self._recalled.get(target, ())

    def token_ids(self) -> Sequence[int]:
        return self._tokens


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
