"""The expert loader: what one cache gets over one link, for the layer that runs (urgent), ahead of it (prefetch) and in
the background; what is taken back; and one layer's fetch. No torch, no files, no clock of its own: the engine gives it
a real link, a simulator a virtual one.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tiermoe.metrics import ExpertCounts
from tiermoe.offload.cache import ExpertCache
from tiermoe.offload.link import Finished, Link
from tiermoe.types import Demand, ExpertKey, Load, Ready

_TOKENS = operator.attrgetter("tokens")
CPU_FALLBACK = -1
"""The slot of an expert that is handed out without one: whoever computes it does so from another copy, on the CPU."""


class ExpertLoader:
    """Loads between a cache and a link. high_bits: the precision below which a load counts as low.

    `counts`: what became of the experts that tokens asked for. `waited_s`: seconds, by the link's clock, in which
    layers waited for loads. `launches`: experts that are yielded run on after they are taken (a GPU's), so that what to
    read ahead is decided meanwhile. `uncommitted`: prefetches that may not have begun, in their order; while there are
    any, `recall` alone knows who has left. `unused_prefetches`: those that have begun, until a layer asks for them."""

    def __init__(self, cache: ExpertCache, link: Link, high_bits: int = 16) -> None:
        self.cache = cache
        self.link = link
        self.counts = ExpertCounts()
        self.waited_s = 0.0
        self.launches = False
        self._high_bits = high_bits
        self.unused_prefetches: set[ExpertKey] = set()
        self.uncommitted: dict[ExpertKey, None] = {}
        self._urgent = 0  # urgent loads that have not ended
        self._background = Background(cache)
        self._on_warmed: Callable[[ExpertKey, int], None] | None = None
        self._unreported: deque[tuple[ExpertKey, int]] = deque()

    @property
    def filling(self) -> int:
        """Background loads that have not ended, as far as is known (`collect`)."""
        return self._background.count

    def listen(self, on_warmed: Callable[[ExpertKey, int], None]) -> None:
        """`report_warmed` calls `on_warmed` with each expert that the background brings from now on, and its slot. For
        a cache that nothing leaves."""
        self._on_warmed = on_warmed

    def report_warmed(self, most: int) -> None:
        """Reports at most `most` experts that the background has brought: it takes time, and a pass waits."""
        for _ in range(min(most, len(self._unreported))):
            assert self._on_warmed is not None
            self._on_warmed(*self._unreported.popleft())

    def fill(self, keys: Iterable[ExpertKey]) -> None:
        """Begins background loads of the absent of `keys`, most wanted first, into slots that are free: nothing leaves
        for them. They are read layer by layer while the link has nothing else to do, whoever computes or waits
        meanwhile. What has not begun is taken back as soon as a layer asks for it, which makes it a miss like any
        other, or for its slot, the least wanted first."""
        absent = (key for key in keys if self.cache.slot(key) is None and key not in self.cache.in_flight)
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

    def prefetch(self, keys: Iterable[ExpertKey], protect: bool = False) -> bool:
        """Has absent `keys` read ahead in their order, while no layer waits for the link (else False, and nothing is
        read), and only into slots that can be had without disturbing what is pinned, in flight or protected. As many
        are read at once as the link has threads. The others wait, and nobody leaves for them before they begin;
        what waited before is taken back. `protect` keeps them from eviction until their layer has run (HOBBIT,
        masking): first those that are resident or arriving, so that no prediction makes another leave."""
        self.recall()
        self.collect()
        named = {key: self.cache.find(*key) or self.cache.arriving(*key) for key in keys}
        if protect:
            for copy in named.values():
                if copy is not None:
                    self.cache.protect(copy)
        if self._urgent:
            return False
        for key, copy in named.items():
            if copy is not None and not self.withdraw(copy):
                continue
            if not self._speculate(key):
                break
            if protect:
                self.cache.protect(key)
        return True

    def run_layer(
        self,
        layer: int,
        demands: Sequence[Demand],
        prefetch: Callable[[], None] | None = None,
        together: bool = False,
        cpu_fallback: Callable[[int], int] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> Iterator[list[Ready]]:
        """Begins a layer's urgent loads, as far as slots can be had, and yields every demand that is not skipped, in
        groups that can be computed together, in the order in which they can: what is resident first, by falling number
        of tokens (EdgeMoE's re-batching: each expert comes once a chunk; Fate's popularity order). An expert stays in
        its slot until the next group is asked for. All that is here is one group; while misses wait for slots each
        expert is one, so that its slot is free for a load as soon as it is computed.

        prefetch: called once, as soon as this layer needs nothing more from the link; if it `launches`, once the last
        experts have been taken too. together: computing starts when all loads are there, as far as the slots
        allow (HOBBIT). cpu_fallback: of so many experts that tokens need and that are neither resident nor in flight,
        how many are not loaded: those of the fewest tokens. They are yielded with the slot CPU_FALLBACK in the
        precision demanded, before all else, so that their computing begins before this device is given work (HOBBIT,
        section 4, CPU-GPU cooperative computing). on_end: called at the end. Raises LoadError if an expert cannot be
        read. `roll_back` after that, and after a run that was not taken to its end."""
        if self.uncommitted:
            self.recall()
        if self.cache.in_flight:
            self.collect()
        fetch = _Fetch(layer)
        counts, unused, missed = self.counts, self.unused_prefetches, list[ExpertKey]()
        demands = sorted(demands, key=_TOKENS, reverse=True)
        for demand, (key, resident) in zip(demands, self.cache.copies(layer, demands), strict=True):
            expert, tokens, bits = demand
            if key is not None and resident:
                fetch.here.append(key)
                counts.hits += tokens > 0
                counts.prefetched += key in unused and tokens > 0
            elif key is not None and not self.withdraw(key):
                fetch.awaited.add(key)
                counts.misses += tokens > 0
            elif bits:
                key = ExpertKey(layer, expert, bits)
                (missed if tokens else fetch.missing).append(key)
                counts.misses += tokens > 0
            else:
                counts.skipped += tokens > 0
                continue
            fetch.demands[key] = demand
            unused.discard(key)
        self.cache.pin(*fetch.here, *fetch.awaited)
        if cpu_fallback is not None and missed:
            loaded = len(missed) - cpu_fallback(len(missed))
            missed, fetch.on_cpu = missed[:loaded], missed[loaded:]
            counts.cpu_fallback += len(fetch.on_cpu)
        fetch.missing.extendleft(reversed(missed))
        if fetch.missing:
            self._load(fetch)
        return self._groups(fetch, prefetch, together, on_end)

    def hit(self, layer: int, demands: Sequence[Demand]) -> None:
        """A layer was computed whose experts were all resident, in the only precision; hits are counted already."""
        if len(demands) > 1:
            demands = sorted(demands, key=_TOKENS, reverse=True)
        keys = [ExpertKey(layer, expert, bits) for expert, _, bits in demands]
        if self.unused_prefetches:
            self.counts.prefetched += len(self.unused_prefetches.intersection(keys))
            self.unused_prefetches.difference_update(keys)
        self.cache.used(keys, demands)
        self.counts.dropped += self.cache.release_layer(layer)

    def recall(self) -> None:
        """Takes prefetches that have not begun back from the link, as if they had not been asked for. Before anybody
        asks what is resident: then it is known who has left for the others."""
        if not self.uncommitted:
            return
        for load in self.link.recall():
            self.cache.cancel(load.key)
            self.uncommitted.pop(load.key)
        for key in list(self.uncommitted):
            self._commit(key)

    def collect(self) -> None:
        """Records what has finished meanwhile. A load that failed here belongs to nobody any more (a prefetch, one in
        the background, or a request that has ended with another error): its slot is freed, and who needs the expert
        asks again."""
        while self.cache.in_flight and (finished := self.link.poll()) is not None:
            self.record(finished)

    def record(self, finished: Finished) -> None:
        """Records the end of a load that the link has handed out; the slot of one that failed is free again."""
        load = finished.load
        self._urgent -= load.urgent
        if load.background:
            self._background.remove(load.key)
        elif load.key in self.uncommitted:
            self._commit(load.key)
        if finished.error is not None:
            self.cache.abandon(load.key)
            self.unused_prefetches.discard(load.key)
            return
        slot = self.cache.arrived(load.key)
        if load.background:
            self.counts.warmed += 1
            if self._on_warmed is not None:
                self._unreported.append((load.key, slot))

    def withdraw(self, key: ExpertKey) -> bool:
        """Takes a background load back that has not begun: the key is absent again."""
        if key not in self._background or not self.link.withdraw(key):
            return False
        self._background.remove(key)
        self.cache.abandon(key)
        return True

    def lend(self, count: int, least: int) -> list[int]:
        """`ExpertCache.lend`, when nothing is under way."""
        if count:
            self.drain()
        return self.cache.lend(count, least)

    def drain(self) -> None:
        """Waits until nothing is under way; what has not begun and is not urgent is taken back."""
        self.recall()
        for key in self._background:
            self.withdraw(key)
        while self.cache.in_flight:
            self.record(self.link.wait())

    def roll_back(self) -> None:
        """After an interruption anywhere, when the link has dropped all that was under way: the cache keeps what is
        resident, and what the background had not brought is asked for again."""
        background = list(self._background)
        self._background = Background(self.cache)
        self.cache.roll_back()
        self.unused_prefetches = {key for key in self.unused_prefetches if self.cache.slot(key) is not None}
        self.uncommitted, self._urgent = {}, 0
        self.fill(background)

    def _groups(
        self, fetch: _Fetch, prefetch: Callable[[], None] | None, together: bool, on_end: Callable[[], None] | None
    ) -> Iterator[list[Ready]]:
        """What `run_layer` yields."""
        cache, here = self.cache, fetch.here
        for _, expert, bits in fetch.on_cpu:
            yield [Ready(expert, CPU_FALLBACK, bits)]
        while together and fetch.awaited:
            self._receive(fetch)
        while here or fetch.awaited or fetch.missing:
            nothing_to_come = not fetch.missing and not fetch.awaited
            if prefetch is not None and nothing_to_come and not self.launches:
                prefetch()
                prefetch = None
            if here:
                keys = [here.popleft()] if fetch.missing else list(here)
                if not fetch.missing:
                    here.clear()
                group = []
                for key in keys:
                    group.append(Ready(key.expert, cache.resident[key], key.bits))
                yield group
                if prefetch is not None and nothing_to_come:
                    prefetch()  # while they are pinned, as before they are computed
                    prefetch = None
                cache.release(keys, fetch.demands)  # policies learn of it while loads are under way
            else:
                self._receive(fetch)
            if fetch.missing:
                self._load(fetch)
        if prefetch is not None:
            prefetch()
        self.counts.dropped += cache.release_layer(fetch.layer)
        if on_end is not None:
            on_end()

    def _load(self, fetch: _Fetch) -> None:
        """Begins urgent loads of as many missing experts as slots can be had for, and pins them."""
        while fetch.missing:
            key = fetch.missing[0]
            if self._background.count:
                self._make_room(key)
            slot = self.cache.reserve(key, pins=1)
            if slot is None:
                return
            self._urgent += 1
            self.counts.loads += 1
            self.counts.low_loads += key.bits < self._high_bits
            self.link.submit(Load(key, slot, True))
            fetch.awaited.add(fetch.missing.popleft())

    def _receive(self, fetch: _Fetch) -> None:
        """Waits for a load. What the layer awaits is here then; a prefetch that failed is asked for again. The error of
        an urgent load that failed is raised."""
        link = self.link
        if not fetch.awaited and not self.cache.in_flight:
            # with nothing awaited, what is under way for others may hold the slots: its end frees one
            slots = self.cache.slots
            raise RuntimeError(f"no slot can be freed for layer {fetch.layer}: {slots} slots are all in use")
        began = link.now()
        finished = link.wait()
        self.waited_s += link.now() - began
        key = finished.load.key
        awaited = key in fetch.awaited
        fetch.awaited.discard(key)
        if finished.error is not None and awaited:
            self.cache.unpin(key)
        self.record(finished)
        if not awaited:
            return
        if finished.error is None:
            fetch.here.append(key)
        elif finished.load.urgent:
            raise finished.error
        else:
            fetch.missing.append(key)

    def _speculate(self, key: ExpertKey) -> bool:
        """Begins a prefetch; False if no slot can be had for it."""
        if self._background.count:
            self._make_room(key)
        slot = self.cache.reserve_speculatively(key)
        if slot is None:
            return False
        self.uncommitted[key] = None
        self.link.submit(Load(key, slot, False))
        return True

    def _commit(self, key: ExpertKey) -> None:
        """A prefetch has begun: it is counted, and who had to leave for it is gone."""
        del self.uncommitted[key]
        self.cache.commit(key)
        self.unused_prefetches.add(key)
        self.counts.speculative_loads += 1
        self.counts.low_loads += key.bits < self._high_bits

    def _make_room(self, key: ExpertKey) -> None:
        """Before anything leaves for a key, the background gives up slots whose loads have not begun."""
        pool, size = self.cache.pool(key), self.cache.size(key)
        if self.cache.free(pool) < size:
            for other in self._background.least_wanted(pool):
                if self.withdraw(other) and self.cache.free(pool) >= size:
                    break


@dataclass(slots=True)
class _Fetch:
    """One layer's experts on their way to be computed, by falling number of tokens."""

    layer: int
    demands: dict[ExpertKey, Demand] = field(default_factory=dict)  # by the copy that serves each
    here: deque[ExpertKey] = field(default_factory=deque)  # resident and pinned, not computed yet
    awaited: set[ExpertKey] = field(default_factory=set)  # in flight and pinned
    missing: deque[ExpertKey] = field(default_factory=deque)  # absent, not asked for yet
    on_cpu: list[ExpertKey] = field(default_factory=list)  # absent, computed on the CPU from another copy


class Background:
    """The keys whose background loads have not ended, by pool; `count` of them."""

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache
        self._pools: dict[int, dict[ExpertKey, None]] = {}
        self.count = 0

    def __contains__(self, key: ExpertKey) -> bool:
        return self.count > 0 and key in self._pools.get(self._cache.pool(key), ())

    def __iter__(self) -> Iterator[ExpertKey]:
        return iter([key for pool in self._pools.values() for key in pool])

    def add(self, key: ExpertKey) -> None:
        """A load of `key` is submitted, less wanted than those of its pool before it."""
        self._pools.setdefault(self._cache.pool(key), {})[key] = None
        self.count += 1

    def remove(self, key: ExpertKey) -> None:
        del self._pools[self._cache.pool(key)][key]
        self.count -= 1

    def least_wanted(self, pool: int) -> list[ExpertKey]:
        """Those of a pool, the least wanted first."""
        return [*reversed(self._pools.get(pool, {}))]


def that_fit(cache: ExpertCache, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
    """Of absent keys, in their order, as many of each pool as it has room for."""
    free: dict[int, int] = {}
    fitting = []
    for key in keys:
        pool = cache.pool(key)
        free.setdefault(pool, cache.free(pool))
        if free[pool] >= cache.size(key):
            free[pool] -= cache.size(key)
            fitting.append(key)
    return fitting
