"""One layer's decisions: what is used first, what is fetched, what waits. No torch, no files, no clock of its own.

The engine gives the controller a real link, a simulator a virtual one: both run these very decisions.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tiermoe.decide.filling import Background, that_fit
from tiermoe.decide.link import Finished, Link
from tiermoe.decide.pools import Pools
from tiermoe.types import Demand, ExpertKey, Load, Ready

ELSEWHERE = -1
"""The slot of an expert that is yielded without one: whoever computes it does so from another copy."""


@dataclass(slots=True)
class Counts:
    """What happened so far, of experts that tokens were routed to. `hits` were there, in a precision that satisfies the
    demand, when the router asked, `prefetched` of them by a prefetch; `misses` were not (also where a prefetch was
    still on its way), `elsewhere` of them yielded to be computed elsewhere; `skipped` were neither there nor worth a
    load. `low_loads`: loads below the highest precision. `warmed`: experts that the background has
    brought."""

    hits: int = 0
    prefetched: int = 0
    misses: int = 0
    elsewhere: int = 0
    skipped: int = 0
    loads: int = 0
    low_loads: int = 0
    speculative_loads: int = 0
    warmed: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Hits of all that was asked for and not skipped; None where nothing was."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None

    def copy(self) -> Counts:
        return dataclasses.replace(self)

    def minus(self, earlier: Counts) -> Counts:
        """What has happened since `earlier`."""
        names = [field.name for field in dataclasses.fields(self)]
        return Counts(**{name: getattr(self, name) - getattr(earlier, name) for name in names})

    def add(self, other: Counts) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Controller:
    """Runs layers over one cache and one link. `high_bits`: the precision below which a load counts as low. `waited_s`:
    seconds, by the link's clock, in which layers waited for loads."""

    def __init__(self, cache: Pools, link: Link, high_bits: int = 16) -> None:
        self.cache = cache
        self.link = link
        self.counts = Counts()
        self.waited_s = 0.0
        self._high_bits = high_bits
        self._unused_prefetches: set[ExpertKey] = set()
        self._lent: dict[ExpertKey, None] = {}  # prefetches that may not have begun, in their order
        self._urgent = 0  # urgent loads that have not ended
        self._background = Background(cache)
        self._on_warmed: Callable[[ExpertKey, int], None] | None = None
        self._untold: deque[tuple[ExpertKey, int]] = deque()

    @property
    def filling(self) -> int:
        """Background loads that have not ended, as far as is known (`collect`)."""
        return len(self._background)

    def tell_warmed(self, listener: Callable[[ExpertKey, int], None]) -> None:
        """`tell` calls `listener` with each expert that the background brings from now on, and its slot. For a cache
        that nothing leaves."""
        self._on_warmed = listener

    def tell(self, most: int) -> None:
        """Tells of at most `most` experts that the background has brought: it takes time, and a pass waits."""
        for _ in range(min(most, len(self._untold))):
            assert self._on_warmed is not None
            self._on_warmed(*self._untold.popleft())

    def fill(self, keys: Iterable[ExpertKey]) -> None:
        """Begins background loads of the absent of `keys`, most wanted first, into slots that are free: nothing leaves
        for them. They are read layer by layer while the link has nothing else to do, whoever computes or waits
        meanwhile. What has not begun is taken back as soon as a layer asks for it, which makes it a miss like any
        other, or for its slot, the least wanted first."""
        absent = (key for key in keys if self.cache.slot(key) is None and not self.cache.in_flight(key))
        fitting = that_fit(self.cache, absent)
        slots: dict[ExpertKey, int] = {}
        for key in reversed(fitting):  # who comes last is evicted last
            slot = self.cache.reserve(key)
            assert slot is not None
            slots[key] = slot
        for key in fitting:
            self._background.add(key)
        for key in sorted(fitting, key=lambda key: key.layer):
            self.link.submit(Load(key, slots[key], urgent=False, background=True))

    def run_layer(
        self,
        layer: int,
        demands: Sequence[Demand],
        speculate: Callable[[], None] | None = None,
        together: bool = False,
        elsewhere: Callable[[int], int] | None = None,
        grouped: bool = False,
    ) -> Iterator[list[Ready]]:
        """Yields every demand that is not skipped, in groups that can be computed together, in the order in which they
        can: what is here first, by falling number of tokens (EdgeMoE's re-batching: each expert comes once a chunk;
        Fate's popularity order). An expert stays in its slot until the next group is asked for.

        speculate: called once, as soon as this layer needs nothing more from the link (that is when a prefetch can
        begin). together: computing starts when all loads are there, as far as the slots allow (HOBBIT). elsewhere: of
        so many experts that tokens need and that are neither here nor on their way, how many are not loaded: those of
        the fewest tokens. They are yielded with the slot ELSEWHERE in the precision demanded, before all else, so that
        their computing begins before this device is given work (HOBBIT, section 4, CPU-GPU cooperative computing).
        grouped: all that is here is one group (the experts of few tokens are computed in one call); else, and while
        misses wait for slots, each expert is one, so that its slot is free for a load as soon as it is computed.
        Raises LoadError where an expert cannot be read; the controller stays usable."""
        run = _LayerRun(self, layer, demands, speculate, elsewhere)
        try:
            yield from run.steps(together, grouped)
        finally:
            run.release()

    def prefetch(self, keys: Iterable[ExpertKey], protect: bool = False) -> bool:
        """Has absent `keys` read ahead in their order, while no layer waits for the link (else False, and nothing is
        read), and only into slots that can be had without disturbing what is pinned, in flight or protected. As many
        are read at once as the link has lanes. Those behind them wait, and nobody leaves for them before they begin;
        what waited before is taken back. `protect` keeps them from eviction until their layer has run (HOBBIT:
        masking): first those that are here already, so that no prediction makes another leave."""
        self.recall()
        self.collect()
        named = {key: self.cache.find(*key) or self.cache.arriving(*key) for key in keys}
        if protect:
            for here in named.values():
                if here is not None:
                    self.cache.protect(here)
        if self._urgent:
            return False
        for key, here in named.items():
            if here is not None and not self.withdraw(here):
                continue
            if not self.load(key, urgent=False):
                break
            if protect:
                self.cache.protect(key)
        return True

    def drain(self) -> None:
        """Waits until nothing is under way; what has not begun and is not urgent is taken back."""
        self.recall()
        for key in self._background:
            self.withdraw(key)
        while not self.link.is_idle() or self._background:
            self.settle(self.link.wait())

    def load(self, key: ExpertKey, urgent: bool) -> bool:
        """Begins to load an absent expert, for a layer or by prefetch; False where no slot can be had for it."""
        slot = self._reserve(key, urgent)
        if slot is None:
            return False
        self._urgent += urgent
        if urgent:
            self._count_load(key, urgent)
        else:
            self._lent[key] = None
        self.link.submit(Load(key, slot, urgent))
        return True

    def taken(self, key: ExpertKey) -> bool:
        """A layer asks for the expert: whether it is the first to use what a prefetch brings."""
        prefetched = key in self._unused_prefetches
        self._unused_prefetches.discard(key)
        return prefetched

    def recall(self) -> None:
        """Takes prefetches that have not begun back from the link, as if they had not been asked for. Before anybody
        asks what is here: then it is known who has left for the others."""
        if not self._lent:
            return
        for load in self.link.recall():
            self.cache.give_back(load.key)
            self._lent.pop(load.key)
        for key in list(self._lent):
            self._begun(key)

    def _begun(self, key: ExpertKey) -> None:
        """A prefetch has: it is counted, and who had to leave for it is gone."""
        del self._lent[key]
        self.cache.take(key)
        self._unused_prefetches.add(key)
        self._count_load(key, urgent=False)

    def _count_load(self, key: ExpertKey, urgent: bool) -> None:
        self.counts.loads += urgent
        self.counts.speculative_loads += not urgent
        self.counts.low_loads += key.bits < self._high_bits

    def collect(self) -> None:
        """Notes what has finished meanwhile. A load that failed here belongs to nobody any more (a prefetch, one in the
        background, or a request that has ended with another error): its slot is freed, and who needs the expert asks
        again."""
        while (self._background or not self.link.is_idle()) and (finished := self.link.poll()) is not None:
            self.settle(finished)

    def settle(self, finished: Finished) -> None:
        """Notes the end of a load that the link has told of; the slot of one that failed is free again."""
        load = finished.load
        self._urgent -= load.urgent
        if load.background:
            self._background.remove(load.key)
        elif load.key in self._lent:
            self._begun(load.key)
        if finished.error is not None:
            self._abandon(load.key)
            return
        slot = self.cache.arrived(load.key)
        if load.background:
            self.counts.warmed += 1
            if self._on_warmed is not None:
                self._untold.append((load.key, slot))

    def _reserve(self, key: ExpertKey, urgent: bool) -> int | None:
        """A slot for an absent key; before anything leaves for it the background gives up what it has not begun."""
        pool = self.cache.pool(key)
        if self._background and not self.cache.free(pool):
            for other in self._background.least_wanted(pool):
                if self.withdraw(other):
                    break
        return self.cache.reserve(key) if urgent else self.cache.lend(key)

    def withdraw(self, key: ExpertKey) -> bool:
        """Takes a background load back that has not begun: the key is absent again."""
        if key not in self._background or not self.link.withdraw(key):
            return False
        self._background.remove(key)
        self.cache.abandon(key)
        return True

    def _abandon(self, key: ExpertKey) -> None:
        self.cache.abandon(key)
        self._unused_prefetches.discard(key)


class _LayerRun:
    """The state of one pass over one layer's demands."""

    def __init__(
        self,
        controller: Controller,
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
        self._pinned: set[ExpertKey] = set()
        self._missing: deque[ExpertKey] = deque()
        self._awaited: set[ExpertKey] = set()

    def steps(self, together: bool, grouped: bool) -> Iterator[list[Ready]]:
        self._take_stock()
        self._submit()
        for key in self._elsewhere:
            yield [Ready(key.expert, ELSEWHERE, key.bits)]
        while together and self._awaited:
            self._receive()
        while self._here or self._awaited or self._missing:
            self._begin_speculation()
            if self._here:
                group = [self._here.popleft() for _ in range(len(self._here) if grouped and not self._missing else 1)]
                yield [self._use(key) for key in group]
                for key in group:
                    self._release(key)
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
            self._release(key)
        self._controller.settle(finished)
        if not awaited:
            return
        if finished.error is None:
            self._here.append(key)
        elif finished.load.urgent:
            raise finished.error
        else:
            self._missing.append(key)

    def release(self) -> None:
        """Unpins what an interrupted pass left pinned; what is in flight arrives later and stays in the cache."""
        for key in self._pinned:
            self._cache.unpin(key)
        self._pinned.clear()

    def _take_stock(self) -> None:
        """Pins what is here or on its way, counts hits and misses, takes idle speculation back from the link."""
        controller, cache = self._controller, self._cache
        controller.recall()
        controller.collect()
        missed: list[ExpertKey] = []  # by falling number of tokens
        for demand in self._ordered:
            key = cache.find(self._layer, demand.expert, demand.bits)
            if key is not None:
                self._pin(key)
                self._here.append(key)
            else:
                key = cache.arriving(self._layer, demand.expert, demand.bits)
                if key is not None and controller.withdraw(key):
                    key = None
                if key is not None:
                    self._pin(key)
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
            self._pin(key)
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

    def _pin(self, key: ExpertKey) -> None:
        self._cache.pin(key)
        self._pinned.add(key)

    def _release(self, key: ExpertKey) -> None:
        self._cache.unpin(key)
        self._pinned.discard(key)
