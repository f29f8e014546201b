"""Several pools of slots that look like one cache: per layer, or for high and low precision.

At first a pool's slots are numbered after those of the pools before it. Each pool evicts by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate

from tiermoe.decide.allotment import Pool
from tiermoe.decide.cache import ExpertCache
from tiermoe.decide.eviction import Eviction
from tiermoe.decide.shares import Shares
from tiermoe.types import Demand, ExpertKey


class Pools:
    """What the controller sees of the cache. evictions: makes the policies of all pools. `precisions`: the bits that
    experts are loaded in. exact_bits: a copy in more bits than are asked for does not stand for one in these.

    Predicted keys can be protected: they leave after all others, and never for another prediction, until their layer
    has run.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        evictions: Callable[[Sequence[Pool]], Sequence[Eviction]],
        precisions: Sequence[int],
        exact_bits: bool = False,
    ) -> None:
        self.slots = sum(pool.slots for pool in pools)
        self._precisions = sorted(precisions, reverse=True)
        self._enough = {bits: [each for each in self._precisions if each >= bits] for bits in precisions}
        self._exact_bits = exact_bits
        self._fresh_evictions = functools.partial(evictions, pools)
        ends = list(accumulate(pool.slots for pool in pools))
        self._slots = [range(end - pool.slots, end) for pool, end in zip(pools, ends, strict=True)]  # at first
        self._caches = [
            ExpertCache(len(slots), policy, slots.start)
            for slots, policy in zip(self._slots, self._fresh_evictions(), strict=True)
        ]
        self._by_place: dict[tuple[int, int], ExpertCache] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        for number, pool in enumerate(pools):
            for layer in pool.layers:
                for bits in pool.bits or self._precisions:
                    self._by_place[layer, bits] = self._caches[number]
                    self._numbers[layer, bits] = number
        self._protected: set[ExpertKey] = set()
        self._shares: dict[int, Shares] = {}  # by precision, where slots move
        self._alike = [[number] for number, pool in enumerate(pools) if not pool.kept]  # pools that exchange slots
        for kind in {pool.bits for pool in pools if pool.kept}:
            alike = [number for number, pool in enumerate(pools) if pool.kept and pool.bits == kind]
            self._alike.append(alike)
            shares = Shares([self._caches[number] for number in alike], pools[alike[0]].kept)
            self._shares.update(dict.fromkeys(kind or self._precisions, shares))

    def __len__(self) -> int:
        return sum(len(cache) for cache in self._caches)

    @property
    def evictions(self) -> int:
        """Keys that have left for others."""
        return sum(cache.evictions for cache in self._caches)

    def find(self, layer: int, expert: int, bits: int) -> ExpertKey | None:
        """The resident copy of the highest precision that is at least `bits`; None where there is none."""
        for precision in self._standing_for(bits):
            key = ExpertKey(layer, expert, precision)
            if self._by_place[layer, precision].slot(key) is not None:
                return key
        return None

    def arriving(self, layer: int, expert: int, bits: int) -> ExpertKey | None:
        """The copy on its way, of the highest precision that is at least `bits`; None where there is none."""
        for precision in self._standing_for(bits):
            key = ExpertKey(layer, expert, precision)
            if self._by_place[layer, precision].in_flight(key):
                return key
        return None

    def slot(self, key: ExpertKey) -> int | None:
        return self._cache(key).slot(key)

    def in_flight(self, key: ExpertKey) -> bool:
        return self._cache(key).in_flight(key)

    def pool(self, key: ExpertKey) -> int:
        """The number of the pool that the key belongs to."""
        return self._numbers[key.layer, key.bits]

    def free(self, pool: int) -> int:
        """Slots of a pool that nothing lies in or is on its way to."""
        return self._caches[pool].free

    def pin(self, key: ExpertKey) -> None:
        self._cache(key).pin(key)

    def unpin(self, key: ExpertKey) -> None:
        self._cache(key).unpin(key)

    def reserve(self, key: ExpertKey) -> int | None:
        """As `ExpertCache.reserve`, in the pool that the key belongs to, which may have a slot more for it."""
        cache = self._cache(key)
        if self._shares and not cache.free:
            self._shares[key.bits].enlarge(key, self._protected)
        return cache.reserve(key, self._protected)

    @property
    def shared(self) -> bool:
        """Whether slots move between layers (`follow`)."""
        return bool(self._shares)

    def follow(self, uses: Sequence[Sequence[float]]) -> None:
        """Slots move to the layers whose experts are used most. uses: a row of experts for each layer."""
        for shares in set(self._shares.values()):
            shares.follow(uses)

    def lend(self, key: ExpertKey) -> int | None:
        """As `ExpertCache.lend`, in the pool that the key belongs to."""
        return self._cache(key).lend(key, self._protected)

    def take(self, key: ExpertKey) -> None:
        self._cache(key).take(key)

    def give_back(self, key: ExpertKey) -> None:
        self._cache(key).give_back(key)

    def arrived(self, key: ExpertKey) -> int:
        return self._cache(key).arrived(key)

    def abandon(self, key: ExpertKey) -> None:
        self._cache(key).abandon(key)

    def used(self, key: ExpertKey, demand: Demand) -> None:
        self._cache(key).used(key, demand)

    def protect(self, key: ExpertKey) -> None:
        """Keeps a predicted key until `release_layer` of its layer."""
        self._protected.add(key)

    def release_layer(self, layer: int) -> None:
        """Layer `layer` has run: what was predicted for it, and for layers before it, is kept no longer."""
        if self._protected:
            self._protected = {key for key in self._protected if key.layer > layer}

    def roll_back(self) -> None:
        """What is resident after an interruption stays (`ExpertCache.keep_resident`), and every other slot is free."""
        self._protected = set()
        evictions = self._fresh_evictions()
        kept = [cache.keep_resident(policy) for cache, policy in zip(self._caches, evictions, strict=True)]
        for alike in self._alike:
            taken = {slot for number in alike for slot in kept[number]}
            free = [slot for number in alike for slot in reversed(self._slots[number]) if slot not in taken]
            for number in alike:
                cache, resident = self._caches[number], len(kept[number])
                cache.put_free([free.pop() for _ in range(min(cache.slots - resident, len(free)))])
            for slot in free:  # one that was between two pools
                self._caches[alike[0]].take_over(slot)

    def new_sequence(self) -> None:
        self._protected.clear()
        for cache in self._caches:
            cache.new_sequence()

    def _standing_for(self, bits: int) -> Sequence[int]:
        """Precisions of the copies that may stand for one of `bits`, the highest first."""
        if self._exact_bits:
            return (bits,)
        return self._enough[bits] if bits in self._enough else [each for each in self._precisions if each >= bits]

    def _cache(self, key: ExpertKey) -> ExpertCache:
        return self._by_place[key.layer, key.bits]
