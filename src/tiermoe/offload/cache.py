"""The expert cache: which expert lies in which slot, and who leaves for another. No weights, no clock.

A key is absent, in flight (it owns a slot that is being filled) or resident. Slots are divided into pools: for layers,
for precisions, or one for all. Each pool evicts by itself. Where pools share slots, a layer's pool grows with the uses
of its experts (`SlotShares`).

Copies of several precisions can share bytes: each takes its own, so two low ones may leave for a high one. A slot then
is a range of addresses that has room for the largest copy and memory for the one that lies in it, since the system
takes the pages behind a smaller copy back (`on_shrink`). No copy has to move, and no bytes are lost between copies, as
in an arena whose extents must be contiguous, or in slots of the smallest copy, of which a larger one fills no whole
number.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tiermoe.offload.policies.allotment import Pool, SlotPool, SlotShares, slot_numbers
from tiermoe.offload.policies.eviction import Eviction
from tiermoe.types import Demand, ExpertKey, Routed

SHARE_EVERY = 16
"""Tokens after which shares are computed again: 1 ms for 6,000 experts."""
_NO_KEY = ExpertKey(-1, -1, 0)
_NOBODY: AbstractSet[ExpertKey] = frozenset()


@dataclass(slots=True, eq=False)
class _Run:
    """The slots that pools of the same precisions share, `numbers`; together they have room for `slots` of the largest
    copies."""

    numbers: range
    slots: int
    pools: list[SlotPool]


class ExpertCache:
    """Slots for experts, numbered through all pools.

    pools: how slots are divided; a single pool takes every key. evictions: makes the policies of all pools. precisions:
    the bits that experts are loaded in. exact_bits: a copy in more bits than a demand asks for does not serve it.
    sizes: bits → bytes of a copy, if copies share the bytes of their pool, which are those of its largest copy for
    each of its slots; None: each copy takes a slot. room: further slots for what is fetched for a layer in the highest
    precision until it has run. Nobody leaves before they are taken; then whoever the policy does not keep does, until
    the layer's pool has no more than its own slots (Fate, section 4.1: experts that are not on the cache list).

    A pinned key and a key in flight never leave: a layer may compute from the slot, or a thread may write into it.
    Protected keys (predicted ones, until their layer has run) leave after all others, and never for a prediction.

    A prefetch reserves its slot speculatively: whoever would leave for it stays resident until `commit`, and its policy
    hears of nothing before; `cancel` leaves all as it was. `on_leave` is called with every key whose slot may be
    written from now on. `on_shrink` is called with a slot and the bytes of it that stay in use, if copies share
    bytes: the memory behind them is counted for others from now on. `evictions`: keys that have left for others.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        evictions: Callable[[Sequence[Pool]], Sequence[Eviction]],
        precisions: Sequence[int],
        exact_bits: bool = False,
        sizes: Mapping[int, int] | None = None,
        room: int = 0,
    ) -> None:
        if min(pool.slots for pool in pools) < 1:
            raise ValueError(f"a pool needs at least one slot, got {[pool.slots for pool in pools]}")
        self.slots = sum(pool.slots for pool in pools) + room
        self.evictions = 0
        self.on_leave: Callable[[ExpertKey], None] | None = None
        self.on_shrink: Callable[[int, int], None] | None = None
        self._sizes = sizes
        self._room = self._unborrowed = room
        self._precisions = sorted(precisions, reverse=True)
        self._serving = {bits: self._that_serve(bits, exact_bits) for bits in range(17)}
        self.resident: dict[ExpertKey, int] = {}  # keys that have come, and their slots; readers may look
        self.in_flight: dict[ExpertKey, int] = {}  # keys that are loaded, and their slots; readers may look
        self._pins: dict[ExpertKey, int] = {}
        self._uncommitted: dict[ExpertKey, ExpertKey | None] = {}  # in flight → who leaves for it, if somebody must
        self._leaving: set[ExpertKey] = set()
        self._lent: list[tuple[SlotPool, int]] = []  # slots whose memory others have for a while
        self.protected: set[ExpertKey] = set()
        self._fresh_evictions = functools.partial(evictions, pools)
        self._runs: list[_Run] = []
        self._pools = self._made(pools)
        self._pool_of: dict[tuple[int, int], SlotPool] = {}
        for pool, made in zip(pools, self._pools, strict=True):
            places = ((layer, bits) for layer in pool.layers for bits in pool.bits or self._precisions)
            self._pool_of.update(dict.fromkeys(places, made))
        if len(pools) == 1:
            self._pool_of = _Everywhere(self._pools[0])
        self._shares: dict[int, SlotShares] = {}  # by precision, if slots move
        for run in self._runs:
            kept = pools[run.pools[0].number].kept
            if kept:
                shares = SlotShares(run.pools, kept)
                self._shares.update(dict.fromkeys(pools[run.pools[0].number].bits or self._precisions, shares))

    def __len__(self) -> int:
        return len(self.resident)

    def slot(self, key: ExpertKey) -> int | None:
        """The slot of a resident key, None if it is absent or in flight."""
        return self.resident.get(key)

    def find(self, layer: int, expert: int, bits: int) -> ExpertKey | None:
        """The resident copy of the highest precision that serves `bits`; None if there is none."""
        for precision in self._serving[bits]:
            key = ExpertKey(layer, expert, precision)
            if key in self.resident:
                return key
        return None

    def arriving(self, layer: int, expert: int, bits: int) -> ExpertKey | None:
        """The copy in flight of the highest precision that serves `bits`; None if there is none."""
        if self.in_flight:
            for precision in self._serving[bits]:
                key = ExpertKey(layer, expert, precision)
                if key in self.in_flight:
                    return key
        return None

    def copies(self, layer: int, demands: Sequence[Demand]) -> list[tuple[ExpertKey | None, bool]]:
        """Of each demand of a layer the copy that `find` gives, else the one that `arriving` gives; and whether it is
        resident."""
        found: list[tuple[ExpertKey | None, bool]] = []
        for expert, _, bits in demands:
            copy, resident = None, False
            for precision in self._serving[bits]:
                key = ExpertKey(layer, expert, precision)
                if key in self.resident:
                    copy, resident = key, True
                    break
                if copy is None and key in self.in_flight:
                    copy = key
            found.append((copy, resident))
        return found

    def pool(self, key: ExpertKey) -> int:
        """The number of the pool that the key belongs to."""
        return self._pool_of[key.layer, key.bits].number

    def size(self, key: ExpertKey) -> int:
        """What a key takes of its pool: 1 slot, or its bytes if copies share them."""
        return 1 if self._sizes is None else self._sizes[key.bits]

    def free(self, pool: int) -> int:
        """What nobody has of a pool: slots, or bytes if copies share them."""
        return self._pools[pool].spare

    def pin(self, *keys: ExpertKey) -> None:
        """Keeps resident or arriving keys until `unpin`; pins count."""
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, *keys: ExpertKey) -> None:
        for key in keys:
            pins = self._pins.pop(key)
            if pins > 1:
                self._pins[key] = pins - 1

    def protect(self, key: ExpertKey) -> None:
        """Keeps a predicted key until `release_layer` of its layer."""
        self.protected.add(key)

    def release_layer(self, layer: int) -> int:
        """Layer `layer` has run: what was predicted for it, and for layers before it, is protected no longer, and its
        pool has its own slots again. Returns how many keys have left for that."""
        if self.protected:
            self.protected = {key for key in self.protected if key.layer > layer}
        if self._unborrowed == self._room:
            return 0
        before = self.evictions
        for pool in {id(pool): pool for bits in self._precisions if (pool := self._pool_of[layer, bits])}.values():
            while pool.borrowed:
                if pool.spare < pool.unit:
                    victim = self._victim(pool, _NO_KEY, self.protected)
                    if victim is None:
                        break
                    self._vacate(pool, victim)
                    self._shrink(pool.free[-1], 0)
                self._pay_back(pool)
        return self.evictions - before

    def reserve(self, key: ExpertKey, pins: int = 0) -> int | None:
        """A slot for an absent key, which is in flight from now on, and pinned so often; a victim is evicted if no slot
        is free. None if every slot is pinned, in flight or reserved speculatively."""
        if key in self.resident or key in self.in_flight:
            raise ValueError(f"{key} already has a slot")
        pool, size = self._pool_of[key.layer, key.bits], 1 if self._sizes is None else self._sizes[key.bits]
        before = len(pool.free)
        slot = None
        if pool.spare >= size or self._make_room(pool, key, size):
            slot = pool.free.pop()
            pool.spare -= size
            if self.on_shrink is not None and len(pool.free) >= before:
                self.on_shrink(slot, size)
        if self.on_shrink is not None:
            for other in pool.free[before:]:
                self.on_shrink(other, 0)
        if slot is None:
            return None
        self.in_flight[key] = slot
        if pins:
            self._pins[key] = pins
        pool.eviction.admitted(key)
        return slot

    def reserve_speculatively(self, key: ExpertKey) -> int | None:
        """As `reserve`, but never in place of a protected key, nobody leaves before `commit`, and then one key at most,
        whose bytes and the spare ones are enough. One of `commit` and `cancel` is called before the next key is looked
        for: a load that has begun has changed the slot's bytes."""
        if key in self.resident or key in self.in_flight:
            raise ValueError(f"{key} already has a slot")
        pool, size = self._pool_of[key.layer, key.bits], self.size(key)
        victim = None
        self._borrow(pool, size)
        if pool.spare >= size:
            slot = pool.take(size)
        else:
            victim = self._victim(pool, key, self.protected, size - pool.spare)
            if victim is None:
                return None
            slot = self.resident[victim]
            pool.spare -= max(size - self.size(victim), 0)
            if self.on_leave is not None:
                self.on_leave(victim)
            self._leaving.add(victim)
        self.in_flight[key] = slot
        self._uncommitted[key] = victim
        return slot

    def commit(self, key: ExpertKey) -> None:
        """The load of a speculative reservation, if there is one, has begun: who was to leave leaves."""
        if key not in self._uncommitted:
            return
        pool, victim = self._pool_of[key.layer, key.bits], self._uncommitted.pop(key)
        if victim is not None:
            pool.eviction.victim(key, {victim}.__contains__)  # policies learn from being asked: again, at the end
            self._vacate(pool, victim)
            slot = pool.free.pop()  # into which the load writes
            pool.spare -= self.size(victim)
            self._leaving.discard(victim)
            if self.size(victim) > self.size(key):
                self._shrink(slot, self.size(key))
                pool.spare += self.size(victim) - self.size(key)
        pool.eviction.admitted(key)

    def cancel(self, key: ExpertKey) -> None:
        """The load of a speculative reservation will not begin: all is as before."""
        pool = self._pool_of[key.layer, key.bits]
        slot, victim = self.in_flight.pop(key), self._uncommitted.pop(key)
        if victim is None:
            pool.put_back(slot, self.size(key))
            if pool.borrowed and pool.spare >= pool.unit:
                self._pay_back(pool)
        else:
            self._leaving.discard(victim)
            pool.spare += max(self.size(key) - self.size(victim), 0)

    @property
    def lent(self) -> int:
        """Slots that are out of use."""
        return len(self._lent)

    def lend(self, count: int, least: int) -> list[int]:
        """Takes up to `count` slots out of use until `take_back`, each of the pool that is the largest then, as long as
        that has more than `least` slots. A pool without a free slot evicts a key."""
        lent: list[int] = []
        while len(lent) < count:
            pool = max(self._pools, key=operator.attrgetter("slots"))
            before = len(pool.free)
            while pool.spare < pool.unit and pool.slots > least:
                victim = self._victim(pool, _NO_KEY, _NOBODY)
                if victim is None:
                    break
                self._vacate(pool, victim)
            for slot in pool.free[before:]:
                self._shrink(slot, 0)
            if pool.spare < pool.unit or pool.slots <= least:
                break
            lent.append(pool.take(pool.unit))
            pool.slots -= 1
            self._lent.append((pool, lent[-1]))
        return lent

    def take_back(self) -> None:
        """All slots are in use again."""
        while self._lent:
            pool, slot = self._lent.pop()
            pool.put_back(slot, pool.unit)
            pool.slots += 1

    def arrived(self, key: ExpertKey) -> int:
        """A key in flight is resident now; returns its slot."""
        slot = self.in_flight.pop(key)
        self.resident[key] = slot
        return slot

    def abandon(self, key: ExpertKey) -> None:
        """A key in flight will not arrive: its slot is free again."""
        pool, slot = self._pool_of[key.layer, key.bits], self.in_flight.pop(key)
        self._shrink(slot, 0)
        pool.put_back(slot, self.size(key))
        pool.eviction.removed(key)

    def release(self, keys: Sequence[ExpertKey], demands: Mapping[ExpertKey, Demand]) -> None:
        """Pinned keys were computed with: `used`, and `unpin`. demands: by key."""
        pins = self._pins
        for key in keys:
            self._pool_of[key.layer, key.bits].eviction.used(key, demands[key])
        for key in keys:
            if pins[key] == 1:
                del pins[key]
            else:
                pins[key] -= 1

    def used(self, keys: Sequence[ExpertKey], demands: Sequence[Demand]) -> None:
        """Tells the eviction policies that resident keys were computed with, one after the other."""
        for key, demand in zip(keys, demands, strict=True):
            self._pool_of[key.layer, key.bits].eviction.used(key, demand)

    def routed(self, routed: Routed) -> None:
        """A layer's router has chosen: tells the layer's policies, which say `reads_weights`."""
        pools = {self._pool_of[routed.layer, bits].number for bits in self._precisions}
        policies = {id(policy): policy for number in pools if (policy := self._pools[number].eviction)}
        for policy in policies.values():
            policy.routed(routed)  # type: ignore[attr-defined]

    def new_sequence(self) -> None:
        """Another request begins."""
        self.protected.clear()
        for pool in self._pools:
            pool.eviction.new_sequence()

    def follow(self, uses: Sequence[Sequence[float]]) -> None:
        """Slots move to the layers whose experts are used most, if they move. uses: a row of experts for each
        layer."""
        for shares in set(self._shares.values()):
            shares.follow(uses)

    def roll_back(self) -> None:
        """After an interruption anywhere, with nothing under way: what is resident stays, unless another may have been
        read over it; nothing is pinned, protected or in flight, and every other slot is free. The policies begin anew:
        their records may be half written."""
        self.resident = {key: slot for key, slot in self.resident.items() if key not in self._leaving}
        for kept in (self.in_flight, self._pins, self._uncommitted, self._leaving, self.protected):
            kept.clear()
        for pool, _ in self._lent:
            pool.slots += 1
        self._lent.clear()
        for pool, eviction in zip(self._pools, self._fresh_evictions(), strict=True):
            pool.eviction = eviction
        taken: dict[int, int] = {}  # by pool
        for key in self.resident:
            pool = self._pool_of[key.layer, key.bits]
            taken[pool.number] = taken.get(pool.number, 0) + self.size(key)
            pool.eviction.admitted(key)
        held = set(self.resident.values())
        self._unborrowed = self._room - sum(pool.borrowed for pool in self._pools)
        for run in self._runs:
            run.pools[0].free[:] = [slot for slot in reversed(run.numbers) if slot not in held]
            for slot in run.pools[0].free:
                self._shrink(slot, 0)
            # one that was between two pools
            run.pools[0].slots += run.slots - sum(pool.slots for pool in run.pools)
            for pool in run.pools:
                pool.spare = (pool.slots + pool.borrowed) * pool.unit - taken.get(pool.number, 0)

    def _made(self, pools: Sequence[Pool]) -> list[SlotPool]:
        policies = self._fresh_evictions()
        made: list[SlotPool] = []
        begin = 0
        for bits, alike in itertools.groupby(pools, operator.attrgetter("bits")):
            slots = [pool.slots for pool in alike]
            sizes = [self.size(ExpertKey(0, 0, each)) for each in bits or self._precisions]
            unit = max(sizes)
            numbers = range(begin, begin + slot_numbers(sum(slots) + (0 if made else self._room), sizes))
            free = [*reversed(numbers)]
            run = _Run(numbers, sum(slots), [])
            for count in slots:
                number, policy = len(made), policies[len(made)]
                alone = sum(other is policy for other in policies) == 1
                evictable = self._evictable if alone else functools.partial(self._evictable_of, number)
                made.append(SlotPool(number, policy, count, unit, count * unit, free, evictable))
                run.pools.append(made[-1])
            self._runs.append(run)
            begin = numbers.stop
        return made

    def _that_serve(self, bits: int, exact: bool) -> Sequence[int]:
        """Precisions of the copies that serve a demand for `bits`, the highest first."""
        return (bits,) if exact else [each for each in self._precisions if each >= bits]

    def _victim(
        self, pool: SlotPool, incoming: ExpertKey, protected: AbstractSet[ExpertKey], least: int = 1
    ) -> ExpertKey | None:
        """least: of its size."""
        evictable = pool.evictable
        if least > 1:
            return pool.eviction.victim(
                incoming, lambda key: self.size(key) >= least and key not in protected and evictable(key)
            )
        if not protected:
            return pool.eviction.victim(incoming, evictable)
        return pool.eviction.victim(incoming, lambda key: key not in protected and evictable(key))

    def _evictable(self, key: ExpertKey) -> bool:
        return key in self.resident and key not in self._pins and key not in self._leaving

    def _evictable_of(self, pool: int, key: ExpertKey) -> bool:
        return self._evictable(key) and self._pool_of[key.layer, key.bits].number == pool

    def _make_room(self, pool: SlotPool, key: ExpertKey, size: int) -> bool:
        """Evicts until a pool has `size` to spare for `key`; False if that cannot be had."""
        if self._unborrowed:
            self._borrow(pool, size)
        if self._shares and pool.spare < size:
            for other in self._shares[key.bits].givers(pool):
                if self._spares_one(other, key):
                    other.give(pool)
                    break
        while pool.spare < size:
            if not self.protected:
                victim = pool.eviction.victim(key, pool.evictable)
            else:
                victim = self._victim(pool, key, self.protected) or self._victim(pool, key, _NOBODY)
            if victim is None:
                return False
            self._vacate(pool, victim)
        return True

    def _borrow(self, pool: SlotPool, size: int) -> None:
        """A slot of the common room, if a pool has less than `size` to spare."""
        if pool.spare < size and self._unborrowed and pool in self._runs[0].pools:
            self._unborrowed -= 1
            pool.borrowed += 1
            pool.spare += pool.unit

    def _pay_back(self, pool: SlotPool) -> None:
        pool.spare -= pool.unit
        pool.borrowed -= 1
        self._unborrowed += 1

    def _vacate(self, pool: SlotPool, victim: ExpertKey) -> None:
        """A key leaves its slot, which is free."""
        self.evictions += 1
        if self.on_leave is not None:
            self.on_leave(victim)
        pool.eviction.removed(victim)
        pool.free.append(self.resident.pop(victim))
        pool.spare += 1 if self._sizes is None else self._sizes[victim.bits]

    def _shrink(self, slot: int, nbytes: int) -> None:
        if self.on_shrink is not None:
            self.on_shrink(slot, nbytes)

    def _spares_one(self, pool: SlotPool, key: ExpertKey) -> bool:
        """Whether a pool has a slot to spare, after evictions, for a `key` of another."""
        while pool.spare < pool.unit:
            victim = self._victim(pool, key, self.protected)
            if victim is None:
                return False
            self._vacate(pool, victim)
        return True


class _Everywhere(dict[tuple[int, int], SlotPool]):
    """One pool for every layer and precision."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool

    def __missing__(self, place: tuple[int, int]) -> SlotPool:
        return self._pool
