"""The second-level cache of a GPU: which experts main memory holds between the drive and the GPU's slots. Decisions
alone: the engine's pinned memory and a simulator's virtual one follow them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiermoe.offload.cache import ExpertCache
from tiermoe.offload.policies.allotment import Pool
from tiermoe.offload.policies.eviction import EVICTIONS, Clock, EvictionContext
from tiermoe.types import Demand, ExpertKey


class SecondLevelCache:
    """Slots in main memory. runs: (bits of the experts that share them, number) of each run of slots.

    An expert that is still here is not read again. The expert that was pinned longest ago is evicted, never one that is
    being read or is pinned: its slot is in use. `hits` and `misses` count what was found here and what was not."""

    def __init__(self, runs: Iterable[tuple[Sequence[int], int]]) -> None:
        self.hits = 0
        self.misses = 0
        self._caches: dict[int, ExpertCache] = {}  # by bits; runs may share one
        for precisions, slots in runs:
            self._caches |= dict.fromkeys(precisions, _least_recently_used(slots, list(precisions)))

    def __len__(self) -> int:
        """Experts that are here."""
        return sum(map(len, set(self._caches.values())))

    def pin_if_here(self, key: ExpertKey) -> bool:
        """Whether `key` is here; it is then pinned until `unpin`."""
        cache = self._caches[key.bits]
        if cache.slot(key) is None:
            return False
        cache.used([key], [Demand(key.expert, 1, key.bits)])
        cache.pin(key)
        self.hits += 1
        return True

    def reserve(self, key: ExpertKey) -> int | None:
        """A slot that `key`, which is absent, is read into; None if all are in use."""
        slot = self._caches[key.bits].reserve(key)
        self.misses += slot is not None
        return slot

    def reserve_free(self, key: ExpertKey) -> int | None:
        """A free slot that `key` is read into before anybody asks for it; None if there is none, or `key` is here or on
        its way."""
        cache = self._caches[key.bits]
        if cache.slot(key) is not None or self.being_read(key) or cache.free(cache.pool(key)) < cache.size(key):
            return None
        return cache.reserve(key)

    def being_read(self, key: ExpertKey) -> bool:
        """Whether `key` has a slot that it is not in yet."""
        return key in self._caches[key.bits].in_flight

    def arrived(self, key: ExpertKey) -> None:
        """`key` was read into its slot, where it is pinned."""
        self._caches[key.bits].arrived(key)
        self._caches[key.bits].pin(key)

    def unpin(self, key: ExpertKey) -> None:
        """Ends one `pin_if_here` or `arrived`."""
        self._caches[key.bits].unpin(key)


def _least_recently_used(slots: int, precisions: list[int]) -> ExpertCache:
    context = EvictionContext(Clock(), slots, layers=1)
    return ExpertCache([Pool(slots, None, range(0))], lambda _: [EVICTIONS["lru"](context)], precisions)
