"""What is here, what is on its way, and who leaves: the bookkeeping of one pool of slots. No weights, no clock."""

from __future__ import annotations

from tiermoe.policy.eviction import Eviction
from tiermoe.types import ExpertKey


class ExpertCache:
    """`slots` equal slots under one eviction policy.

    A key is absent, in flight (it owns a slot that is being filled) or resident. A pinned key and a key in flight are
    never victims (DESIGN, invariant 3).
    """

    def __init__(self, slots: int, eviction: Eviction) -> None:
        if slots < 1:
            raise ValueError(f"a cache needs at least one slot, got {slots}")
        self.slots = slots
        self._eviction = eviction
        self._free = list(range(slots - 1, -1, -1))
        self._resident: dict[ExpertKey, int] = {}
        self._in_flight: dict[ExpertKey, int] = {}
        self._pins: dict[ExpertKey, int] = {}

    def __len__(self) -> int:
        return len(self._resident)

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

    def reserve(self, key: ExpertKey) -> int | None:
        """A slot for an absent key, which is in flight from now on; a victim is evicted where no slot is free.
        None where every slot is pinned or in flight."""
        if key in self._resident or key in self._in_flight:
            raise ValueError(f"{key} already has a slot")
        if self._free:
            slot = self._free.pop()
        else:
            victim = self._eviction.victim(self._evictable)
            if victim is None:
                return None
            slot = self._resident.pop(victim)
            self._eviction.removed(victim)
        self._in_flight[key] = slot
        self._eviction.admitted(key)
        return slot

    def arrived(self, key: ExpertKey) -> int:
        """A key in flight is resident now; returns its slot."""
        slot = self._in_flight.pop(key)
        self._resident[key] = slot
        return slot

    def abandon(self, key: ExpertKey) -> None:
        """A key in flight will not arrive: its slot is free again."""
        self._free.append(self._in_flight.pop(key))
        self._eviction.removed(key)

    def used(self, key: ExpertKey) -> None:
        """Tells the eviction policy that a resident key is computed with."""
        self._eviction.used(key)

    def _evictable(self, key: ExpertKey) -> bool:
        return key in self._resident and key not in self._pins
