"""One layer's decisions: what is used first, what is fetched, what waits. No torch, no files, no clock of its own.

The engine gives the controller a real link, a simulator a virtual one: both run these very decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tiermoe.link import Finished, Link
from tiermoe.policy.cache import ExpertCache
from tiermoe.types import Demand, ExpertKey, Load


@dataclass(slots=True)
class Counts:
    """What happened so far. `hits` were there when the router asked, `prefetched` of them by a prefetch;
    `misses` were not (also where a prefetch was still on its way)."""

    hits: int = 0
    prefetched: int = 0
    misses: int = 0
    loads: int = 0
    speculative_loads: int = 0


class Controller:
    """Runs layers over one cache and one link."""

    def __init__(self, cache: ExpertCache, link: Link) -> None:
        self.cache = cache
        self.link = link
        self.counts = Counts()
        self._unused_prefetches: set[ExpertKey] = set()

    def run_layer(self, layer: int, demands: Sequence[Demand]) -> Iterator[tuple[int, int]]:
        """Yields (expert, slot) for every demand, in the order in which they can be computed: what is here first,
        each group by falling number of tokens (EdgeMoE's re-batching: each expert comes once a chunk). An expert stays
        in its slot until the next one is asked for. Raises LoadError where an expert cannot be read; the controller
        stays usable."""
        run = _LayerRun(self, layer, demands)
        try:
            yield from run.steps()
        finally:
            run.release()

    def prefetch(self, keys: Iterable[ExpertKey]) -> None:
        """Begins speculative loads of absent `keys` in their order, only while the link has nothing else to do, and
        only into slots that can be had without disturbing what is pinned or in flight."""
        self._collect()
        if not self.link.is_idle():
            return
        for key in keys:
            if self.cache.slot(key) is not None or self.cache.in_flight(key):
                continue
            slot = self.cache.reserve(key)
            if slot is None:
                return
            self.counts.speculative_loads += 1
            self._unused_prefetches.add(key)
            self.link.submit(Load(key, slot, urgent=False))

    def drain(self) -> None:
        """Waits until nothing is under way."""
        self._recall()
        while not self.link.is_idle():
            self._settle(self.link.wait())
        self._collect()

    def _recall(self) -> None:
        """Takes idle speculation back from the link; its slots are free again."""
        if not self.link.is_idle():
            for load in self.link.recall():
                self._abandon(load.key)

    def _collect(self) -> None:
        """Notes what has finished meanwhile. A load that failed here belongs to nobody any more (a prefetch, or a
        request that has ended with another error): its slot is freed, and who needs the expert asks again."""
        while not self.link.is_idle() and (finished := self.link.poll()) is not None:
            self._settle(finished)

    def _settle(self, finished: Finished) -> None:
        if finished.error is None:
            self.cache.arrived(finished.load.key)
        else:
            self._abandon(finished.load.key)

    def _abandon(self, key: ExpertKey) -> None:
        self.cache.abandon(key)
        self._unused_prefetches.discard(key)


class _LayerRun:
    """The state of one pass over one layer's demands."""

    def __init__(self, controller: Controller, layer: int, demands: Sequence[Demand]) -> None:
        self._controller = controller
        self._cache = controller.cache
        ordered = sorted(demands, key=lambda demand: -demand.tokens)
        self._keys = [ExpertKey(layer, demand.expert, demand.bits) for demand in ordered]
        self._pinned: set[ExpertKey] = set()
        self._missing: deque[ExpertKey] = deque()
        self._awaited: set[ExpertKey] = set()

    def steps(self) -> Iterator[tuple[int, int]]:
        controller, cache = self._controller, self._cache
        self._take_stock()
        here = [key for key in self._keys if cache.slot(key) is not None]
        self._submit()
        for key in here:
            yield self._use(key)
            self._release(key)
            self._submit()
        while self._awaited or self._missing:
            # with nothing awaited, wrong prefetches still under way may hold the slots: their end frees one
            if not self._awaited and controller.link.is_idle():
                raise RuntimeError(
                    f"no slot can be freed for layer {self._missing[0].layer}: {cache.slots} slots are all in use"
                )
            arrived = self._next_arrival()
            if arrived is not None:
                yield self._use(arrived)
                self._release(arrived)
            self._submit()

    def _next_arrival(self) -> ExpertKey | None:
        """Waits for a load; returns its key if this layer awaits it. A prefetch that failed is asked for again."""
        finished = self._controller.link.wait()
        key = finished.load.key
        awaited = key in self._awaited
        self._awaited.discard(key)
        if finished.error is not None and awaited:
            self._release(key)
        self._controller._settle(finished)
        if finished.error is None:
            return key if awaited else None
        if awaited and finished.load.urgent:
            raise finished.error
        if awaited:
            self._missing.append(key)
        return None

    def release(self) -> None:
        """Unpins what an interrupted pass left pinned; what is in flight arrives later and stays in the cache."""
        for key in self._pinned:
            self._cache.unpin(key)
        self._pinned.clear()

    def _take_stock(self) -> None:
        """Pins what is here or on its way, counts hits and misses, takes idle speculation back from the link."""
        controller, cache = self._controller, self._cache
        controller._collect()
        controller._recall()
        for key in self._keys:
            if cache.slot(key) is not None:
                self._pin(key)
                controller.counts.hits += 1
                if key in controller._unused_prefetches:
                    controller.counts.prefetched += 1
            else:
                controller.counts.misses += 1
                if cache.in_flight(key):
                    self._pin(key)
                    self._awaited.add(key)
                else:
                    self._missing.append(key)
            controller._unused_prefetches.discard(key)

    def _submit(self) -> None:
        """Sends as many missing experts to the link as slots can be had for."""
        while self._missing:
            key = self._missing[0]
            slot = self._cache.reserve(key)
            if slot is None:
                return
            self._missing.popleft()
            self._pin(key)
            self._awaited.add(key)
            self._controller.counts.loads += 1
            self._controller.link.submit(Load(key, slot, urgent=True))

    def _use(self, key: ExpertKey) -> tuple[int, int]:
        slot = self._cache.slot(key)
        assert slot is not None
        self._cache.used(key)
        return key.expert, slot

    def _pin(self, key: ExpertKey) -> None:
        self._cache.pin(key)
        self._pinned.add(key)

    def _release(self, key: ExpertKey) -> None:
        self._cache.unpin(key)
        self._pinned.discard(key)
