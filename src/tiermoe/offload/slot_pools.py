"""Pools of slots: for layers, for precisions, or one for all. Each evicts by itself. Where pools share slots, a layer's
pool grows with the uses of its experts."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from tiermoe.offload.policies.eviction import Eviction
from tiermoe.types import ExpertKey


@dataclass(slots=True, eq=False)
class SlotPool:
    """Room for `slots` of the largest copies under one eviction policy, each of size `unit`. `spare`: how much of it
    nobody has. `free`: slots in which nothing lies, one list for all pools of the same precisions. `evictable`: whether
    a key of this pool may leave now. `borrowed`: slots beyond `slots` until its layer has run."""

    number: int
    eviction: Eviction
    slots: int
    unit: int
    spare: int
    free: list[int]
    evictable: Callable[[ExpertKey], bool]
    borrowed: int = 0
    wanted: int = field(init=False)  # its share of the slots, where pools share them

    def __post_init__(self) -> None:
        self.wanted = self.slots

    def take(self, size: int) -> int:
        """A slot for a copy of `size`, which the pool has to spare."""
        self.spare -= size
        return self.free.pop()

    def put_back(self, slot: int, size: int) -> None:
        """A slot in which a copy of `size` lay is free."""
        self.free.append(slot)
        self.spare += size

    def give(self, other: SlotPool) -> None:
        """Room for one of the largest copies, which this pool has to spare."""
        self.slots -= 1
        self.spare -= self.unit
        other.slots += 1
        other.spare += self.unit


class SlotShares:
    """Slots that move between the pools of one precision, one pool a layer, to where experts are used most. minimum:
    slots that each layer keeps.

    Routing is more even in some layers than in others. With as many slots in each, layers that keep to few experts hold
    some that nobody asks for while others miss. One pool for all would hold the most used experts of the model, but
    then what a layer has just read is first to leave when the next layers miss: before its own layer runs again. So a
    layer evicts its own, and how many slots it has follows from the uses of all layers' experts."""

    def __init__(self, pools: Sequence[SlotPool], minimum: int) -> None:
        self._pools = pools
        self._minimum = minimum

    def follow(self, uses: Sequence[Sequence[float]]) -> None:
        """The shares are those of `uses` from now on. Free slots move at once, others when a layer misses."""
        sizes = most_used_slots(sum(pool.slots for pool in self._pools), uses, self._minimum)
        for pool, size in zip(self._pools, sizes, strict=True):
            pool.wanted = size
        givers = [pool for pool in self._pools for _ in range(min(pool.spare // pool.unit, pool.slots - pool.wanted))]
        for pool in self._pools:
            while givers and pool.slots < pool.wanted:
                givers.pop().give(pool)

    def givers(self, taker: SlotPool) -> list[SlotPool]:
        """Who gives a slot to `taker`: the pool with most free slots beyond its minimum, before anybody leaves;
        where none is and `taker` is below its share, pools above theirs, the furthest above first."""
        giver, most = None, 0
        for pool in self._pools:
            spare = min(pool.spare // pool.unit, pool.slots - self._minimum)
            if spare > most:
                giver, most = pool, spare
        if giver is not None:
            return [giver]
        if taker.slots >= taker.wanted:
            return []
        above = [pool for pool in self._pools if pool.slots > pool.wanted]
        return sorted(above, key=lambda pool: pool.slots - pool.wanted, reverse=True)


def slot_numbers(slots: int, sizes: Sequence[int]) -> int:
    """How many copies of `sizes` bytes can lie in the bytes of `slots` of the largest."""
    return slots * max(sizes) // min(sizes)


def most_used_slots(slots: int, uses: Sequence[Sequence[float]], minimum: int) -> list[int]:
    """Slots of each layer: `minimum`, and one for each of its other experts that is among the most used of all layers,
    as far as `slots` go; of equally used ones those of all layers in turn. uses: a row of at least `minimum` experts a
    layer. The sum is less than `slots` only where every expert has one."""
    others = [sorted(row, reverse=True)[minimum:] for row in uses]
    ranked = sorted(chain.from_iterable(others), reverse=True)
    left = slots - minimum * len(uses)
    if left >= len(ranked):
        return [minimum + len(row) for row in others]
    threshold = ranked[left]  # of the first that has none
    sizes = [minimum + bisect_left(row, -threshold, key=operator.neg) for row in others]
    equal = [row.count(threshold) for row in others]
    turns = [layer for turn in range(max(equal)) for layer, count in enumerate(equal) if count > turn]
    for layer in turns[: slots - sum(sizes)]:
        sizes[layer] += 1
    return sizes
