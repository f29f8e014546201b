"""Loads of experts: for a layer, by prefetch or in the background; what begins, what ends, what is taken back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from tiermoe.decide.counts import Counts
from tiermoe.decide.filling import Background, that_fit
from tiermoe.decide.link import Finished, Link
from tiermoe.decide.pools import Pools
from tiermoe.types import ExpertKey, Load


class Loads:
    """What is under way between one cache and one link. `high_bits`: the precision below which a load counts as low.
    `waited_s`: seconds, by the link's clock, in which layers waited for loads."""

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

    def roll_back(self) -> None:
        """After an interruption anywhere, when the link has dropped all that was under way: the cache keeps what is
        resident, and what the background had not brought is asked for again."""
        background = list(self._background)
        self._background = Background(self.cache)
        self.cache.roll_back()
        self._unused_prefetches = {key for key in self._unused_prefetches if self.cache.slot(key) is not None}
        self._lent, self._urgent = {}, 0
        self.fill(background)

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
