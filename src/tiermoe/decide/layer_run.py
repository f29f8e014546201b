"""One layer's decisions: what is used first, what is fetched, what waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from tiermoe.decide.loads import Loads
from tiermoe.types import Demand, ExpertKey, Ready

ELSEWHERE = -1
"""The slot of an expert that is yielded without one: whoever computes it does so from another copy."""


class LayerRun:
    """The state of one pass over one layer's demands; see `Controller.run_layer`."""

    def __init__(
        self,
        controller: Loads,
        layer: int,
        demands: Sequence[Demand],
        speculate: Callable[[], None] | None,
        elsewhere: Callable[[int], int] | None,
    ) -> None:
        self._controller = controller
        self._cache = controller.cache
        self._layer = layer
        self._ordered = sorted(demands, key=lambda demand: -demand.tokens)
        self._speculate = speculate
        self._how_many_elsewhere = elsewhere
        self._elsewhere: list[ExpertKey] = []
        self._demands: dict[ExpertKey, Demand] = {}  # by the copy that serves it
        self._here: deque[ExpertKey] = deque()
        self._missing: deque[ExpertKey] = deque()
        self._awaited: set[ExpertKey] = set()

    def steps(self, together: bool) -> Iterator[list[Ready]]:
        self._take_stock()
        self._submit()
        for key in self._elsewhere:
            yield [Ready(key.expert, ELSEWHERE, key.bits)]
        while together and self._awaited:
            self._receive()
        while self._here or self._awaited or self._missing:
            self._begin_speculation()
            if self._here:
                group = [self._here.popleft() for _ in range(1 if self._missing else len(self._here))]
                yield [self._use(key) for key in group]
                for key in group:
                    self._cache.unpin(key)
            elif not self._awaited and self._controller.link.is_idle() and not self._controller.filling:
                # with nothing awaited, what is under way for others may hold the slots: its end frees one
                raise RuntimeError(
                    f"no slot can be freed for layer {self._layer}: {self._cache.slots} slots are all in use"
                )
            else:
                self._receive()
            self._submit()
        self._begin_speculation()
        self._cache.release_layer(self._layer)

    def _receive(self) -> None:
        """Waits for a load. What this layer awaits can be used then; a prefetch that failed is asked for again."""
        link = self._controller.link
        began = link.now()
        finished = link.wait()
        self._controller.waited_s += link.now() - began
        key = finished.load.key
        awaited = key in self._awaited
        self._awaited.discard(key)
        if finished.error is not None and awaited:
            self._cache.unpin(key)
        self._controller.settle(finished)
        if not awaited:
            return
        if finished.error is None:
            self._here.append(key)
        elif finished.load.urgent:
            raise finished.error
        else:
            self._missing.append(key)

    def _take_stock(self) -> None:
        """Pins what is here or on its way, counts hits and misses, takes idle speculation back from the link."""
        controller, cache = self._controller, self._cache
        controller.recall()
        controller.collect()
        missed: list[ExpertKey] = []  # by falling number of tokens
        for demand in self._ordered:
            key = cache.find(self._layer, demand.expert, demand.bits)
            if key is not None:
                self._cache.pin(key)
                self._here.append(key)
            else:
                key = cache.arriving(self._layer, demand.expert, demand.bits)
                if key is not None and controller.withdraw(key):
                    key = None
                if key is not None:
                    self._cache.pin(key)
                    self._awaited.add(key)
                elif demand.bits:
                    key = ExpertKey(self._layer, demand.expert, demand.bits)
                    (missed if demand.tokens else self._missing).append(key)
            self._count(demand, key, prefetched=key is not None and controller.taken(key))
            if key is not None:
                self._demands[key] = demand
        loaded = len(missed) - (self._how_many_elsewhere(len(missed)) if self._how_many_elsewhere else 0)
        self._missing.extendleft(reversed(missed[:loaded]))
        self._elsewhere = missed[loaded:]
        controller.counts.elsewhere += len(self._elsewhere)

    def _count(self, demand: Demand, key: ExpertKey | None, prefetched: bool) -> None:
        counts = self._controller.counts
        if not demand.tokens:
            return
        if key is None:
            counts.skipped += 1
        elif self._cache.slot(key) is None:
            counts.misses += 1
        else:
            counts.hits += 1
            counts.prefetched += prefetched

    def _submit(self) -> None:
        """Sends as many missing experts to the link as slots can be had for."""
        while self._missing and self._controller.load(self._missing[0], urgent=True):
            key = self._missing.popleft()
            self._cache.pin(key)
            self._awaited.add(key)

    def _begin_speculation(self) -> None:
        if self._speculate is not None and not self._missing and not self._awaited:
            speculate, self._speculate = self._speculate, None
            speculate()

    def _use(self, key: ExpertKey) -> Ready:
        slot = self._cache.slot(key)
        assert slot is not None
        self._cache.used(key, self._demands[key])
        return Ready(key.expert, slot, key.bits)
