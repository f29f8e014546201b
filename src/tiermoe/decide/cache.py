"""What is here, what is on its way, and who leaves: the bookkeeping of one pool of slots. No weights, no clock."""

from __future__ import annotations

from collections.abc import Container

from tiermoe.decide.eviction import Eviction
from tiermoe.types import Demand, ExpertKey


class ExpertCache:
    """`slots` equal slots, numbered from `first`, under one eviction policy.

    A key is absent, in flight (it owns a slot that is being filled) or resident. A pinned key and a key in flight are
    never victims: a layer may compute from the slot, or a lane may write into it.

    A slot can leave for another pool and one of another pool come (`give_up`, `give_free`, `take_over`).

    A slot can be lent for a load that may still be taken back: who would leave for it is resident until `take`, and its
    eviction policy hears of nothing before. `evictions`: keys that have left for others.
    """

    def __init__(self, slots: int, eviction: Eviction, first: int = 0) -> None:
        if slots < 1:
            raise ValueError(f"a cache needs at least one slot, got {slots}")
        self.slots = slots
        self._eviction = eviction
        self._free = list(range(first + slots - 1, first - 1, -1))
        self._resident: dict[ExpertKey, int] = {}
        self._in_flight: dict[ExpertKey, int] = {}
        self._pins: dict[ExpertKey, int] = {}
        self._lent: dict[ExpertKey, ExpertKey | None] = {}  # in flight → who leaves for it, if somebody must
        self._leaving: set[ExpertKey] = set()
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._resident)

    @property
    def free(self) -> int:
        """Slots that nothing lies in or is on its way to."""
        return len(self._free)

    def slot(self, key: ExpertKey) -> int | None:
        """The slot of a resident key, None where it is absent or in flight."""
        return self._resident.get(key)

    def in_flight(self, key: ExpertKey) -> bool:
        return key in self._in_flight

    def pin(self, key: ExpertKey) -> None:
        """Keeps a resident or arriving key until `unpin`; pins count."""
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: ExpertKey) -> None:
        pins = self._pins.pop(key)
        if pins > 1:
            self._pins[key] = pins - 1

    def reserve(self, key: ExpertKey, protected: Container[ExpertKey] = ()) -> int | None:
        """A slot for an absent key, which is in flight from now on; a victim is evicted where no slot is free.
        None where every slot is pinned, in flight or lent. `protected` keys leave last."""
        self._check_absent(key)
        slot = self._vacated(key, protected)
        if slot is None and protected:
            slot = self._vacated(key, ())
        if slot is not None:
            self._in_flight[key] = slot
            self._eviction.admitted(key)
        return slot

    def give_up(self, key: ExpertKey, protected: Container[ExpertKey] = ()) -> int | None:
        """A slot that leaves this pool for a `key` of another: a free one, else a victim's, who is evicted. None where
        every slot is pinned, in flight, lent or `protected`."""
        slot = self._vacated(key, protected)
        self.slots -= slot is not None
        return slot

    def give_free(self) -> int:
        """A free slot that leaves this pool; there must be one."""
        self.slots -= 1
        return self._free.pop()

    def take_over(self, slot: int) -> None:
        """A slot that another pool gave up is a free one of this pool."""
        self._free.append(slot)
        self.slots += 1

    def lend(self, key: ExpertKey, protected: Container[ExpertKey] = ()) -> int | None:
        """As `reserve`, but never in place of a `protected` key, and nobody leaves before `take`; `give_back` undoes
        it. Whoever lends says one of the two before the next key is looked for here: a load that has begun has
        changed the slot's bytes."""
        self._check_absent(key)
        victim = None
        if self._free:
            slot = self._free.pop()
        else:
            victim = self._victim(key, protected)
            if victim is None:
                return None
            slot = self._resident[victim]
            self._leaving.add(victim)
        self._in_flight[key] = slot
        self._lent[key] = victim
        return slot

    def take(self, key: ExpertKey) -> None:
        """The load of a key that a slot was lent to has begun, if it was: who was to leave leaves."""
        if key not in self._lent:
            return
        victim = self._lent.pop(key)
        if victim is not None:
            self._eviction.victim(key, {victim}.__contains__)  # policies learn from being asked: again, at the end
            self._evict(victim)
            self._leaving.discard(victim)
        self._eviction.admitted(key)

    def give_back(self, key: ExpertKey) -> None:
        """The load of a key that a slot was lent to will not begin: all is as before."""
        slot, victim = self._in_flight.pop(key), self._lent.pop(key)
        if victim is None:
            self._free.append(slot)
        else:
            self._leaving.discard(victim)

    def arrived(self, key: ExpertKey) -> int:
        """A key in flight is resident now; returns its slot."""
        slot = self._in_flight.pop(key)
        self._resident[key] = slot
        return slot

    def abandon(self, key: ExpertKey) -> None:
        """A key in flight will not arrive: its slot is free again."""
        self._free.append(self._in_flight.pop(key))
        self._eviction.removed(key)

    def used(self, key: ExpertKey, demand: Demand) -> None:
        """Tells the eviction policy that a resident key is computed with."""
        self._eviction.used(key, demand)

    def keep_resident(self, eviction: Eviction) -> list[int]:
        """After an interruption anywhere, with nothing under way: what is resident stays, unless another may have been
        read over it; pins and what was in flight are gone, and no slot is free (`put_free`). eviction: takes the place
        of the policy, whose records may be half written. Returns the slots of what stays."""
        self._resident = {key: slot for key, slot in self._resident.items() if key not in self._leaving}
        self._eviction, self._free, self._in_flight, self._pins = eviction, [], {}, {}
        self._lent, self._leaving = {}, set()
        for key in self._resident:
            eviction.admitted(key)
        return list(self._resident.values())

    def put_free(self, slots: list[int]) -> None:
        """Slots in which nothing lies are free ones of this pool, beside what is resident: it has no others."""
        self._free = slots
        self.slots = len(self._resident) + len(slots)

    def new_sequence(self) -> None:
        """Tells the eviction policy that another request begins."""
        self._eviction.new_sequence()

    def _vacated(self, key: ExpertKey, protected: Container[ExpertKey]) -> int | None:
        """A slot in which nothing lies any more, for `key`."""
        if self._free:
            return self._free.pop()
        victim = self._victim(key, protected)
        if victim is None:
            return None
        return self._evict(victim)

    def _evict(self, victim: ExpertKey) -> int:
        """The slot in which it lay."""
        self.evictions += 1
        self._eviction.removed(victim)
        return self._resident.pop(victim)

    def _check_absent(self, key: ExpertKey) -> None:
        if key in self._resident or key in self._in_flight:
            raise ValueError(f"{key} already has a slot")

    def _victim(self, incoming: ExpertKey, protected: Container[ExpertKey]) -> ExpertKey | None:
        if not protected:
            return self._eviction.victim(incoming, self._evictable)
        return self._eviction.victim(incoming, lambda key: self._evictable(key) and key not in protected)

    def _evictable(self, key: ExpertKey) -> bool:
        return key in self._resident and key not in self._pins and key not in self._leaving
