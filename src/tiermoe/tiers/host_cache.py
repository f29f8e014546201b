"""Experts in main memory on their way to a GPU: the second-level cache."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

import torch

from tiermoe.decide.cache import ExpertCache
from tiermoe.decide.eviction import EVICTIONS, Eviction, EvictionContext
from tiermoe.decide.eviction.protocol import Clock
from tiermoe.decide.misses import averaged
from tiermoe.tiers.copier import Mark, Ticket
from tiermoe.tiers.copies import CopyQueue
from tiermoe.tiers.slots import HostSlots
from tiermoe.types import Demand, ExpertKey


class Filler(Protocol):
    """Reads experts into slots in main memory (`tiers.disk.SlotFiller`)."""

    @property
    def busy_s(self) -> float: ...

    @property
    def bytes_read(self) -> int: ...

    def fill(self, key: ExpertKey, slot: torch.Tensor) -> None: ...

    def roll_back(self) -> None: ...

    def close(self) -> None: ...


class HostCache:
    """Pinned slots in main memory, filled by `filler` and copied from by `copies`. Any thread may call. slots: of the
    experts of each precision; precisions may share slots.

    An expert that is still here is not read again. The expert that was copied longest ago is evicted, never one that is
    being read or copied, or borrowed: its slot is in use. `hits` and `misses` count what was found here, to be copied
    or borrowed, and what was not. `read_s`: what the last reads took on average, 0 before the first.
    """

    def __init__(self, filler: Filler, slots: Mapping[int, HostSlots], copies: CopyQueue) -> None:
        self.hits = 0
        self.misses = 0
        self.read_s = 0.0
        self._filler = filler
        self._slots = slots
        self._copies = copies
        self._lock, self._changed = copies.lock, copies.changed
        self._runs = {run: ExpertCache(run.count, _least_recently(run.count)) for run in set(slots.values())}
        self._caches = {bits: self._runs[run] for bits, run in slots.items()}

    def pin_if_here(self, key: ExpertKey) -> bool:
        """Whether `key` is here; it is then pinned until `copy` is done or `give_back`."""
        with self._lock:
            cache = self._caches[key.bits]
            if cache.slot(key) is None:
                return False
            cache.used(key, Demand(key.expert, 1, key.bits))
            cache.pin(key)
            self.hits += 1
            return True

    def bring(self, key: ExpertKey) -> None:
        """Pins `key`, which is read if it is not here yet. LoadError where it cannot be read."""
        while not self.pin_if_here(key):
            slot = self._reserve(key)
            if slot is not None:
                self._read(key, slot)
                return

    def buffer(self, key: ExpertKey) -> torch.Tensor:
        """The slot of a pinned expert, uint8 (slot_bytes,)."""
        with self._lock:
            slot = self._caches[key.bits].slot(key)
        assert slot is not None
        return self._slots[key.bits].buffer(slot)

    def borrow(self, key: ExpertKey) -> torch.Tensor:
        """The slot of an expert, uint8 (slot_bytes,), kept until `give_back`. It is read first where it is not here,
        which waits for a slot. LoadError where it cannot be read."""
        self.bring(key)
        return self.buffer(key)

    def give_back(self, key: ExpertKey) -> None:
        """Ends one `borrow` or `bring`: the expert's slot may be taken again."""
        with self._lock:
            self._caches[key.bits].unpin(key)
            self._changed.notify_all()

    def copy(self, key: ExpertKey, nbytes: int, target: torch.Tensor, after: Mark) -> Ticket:
        """Asks for the copy of a pinned expert, which is unpinned once that is over, or where asking fails."""
        try:
            ticket = self._copies.start(key, self.buffer(key)[:nbytes], target[:nbytes], after)
        except Exception:
            self.give_back(key)
            raise
        with self._lock:
            self._unpin_copied()
        return ticket

    def roll_back(self) -> None:
        """After an interruption of a caller anywhere: what is here stays, and nothing is in use. Nothing may be read,
        copied or borrowed."""
        self._filler.roll_back()
        with self._lock:
            self._copies.take_ended()  # whose pins go with all others
        for run, cache in self._runs.items():
            kept = cache.keep_resident(_least_recently(run.count))
            cache.put_free([slot for slot in range(run.count) if slot not in kept])

    def close(self) -> None:
        """Gives the slots back. Nothing may be read, copied or borrowed."""
        self._filler.close()
        for run in self._runs:
            run.close()

    def _read(self, key: ExpertKey, slot: int) -> None:
        started = time.perf_counter()
        try:
            self._filler.fill(key, self._slots[key.bits].buffer(slot))
        except BaseException:
            with self._lock:
                self._caches[key.bits].abandon(key)
                self._changed.notify_all()
            raise
        with self._lock:
            self.read_s = averaged(self.read_s or None, time.perf_counter() - started)
            self._caches[key.bits].arrived(key)
            self._caches[key.bits].pin(key)
            self._changed.notify_all()

    def _reserve(self, key: ExpertKey) -> int | None:
        """A slot for `key`; where all are in use, waits for the oldest copy, for a lane or for what is borrowed. None
        where another thread reads `key` meanwhile, once it is done."""
        cache = self._caches[key.bits]
        while True:
            with self._lock:
                if cache.in_flight(key):
                    self._changed.wait_for(lambda: not cache.in_flight(key))
                    return None
                if cache.slot(key) is not None:
                    return None
                self._unpin_copied()
                slot = cache.reserve(key)
                if slot is not None:
                    self.misses += 1
                    return slot
                oldest = self._copies.oldest()
                if oldest is None:
                    self._changed.wait()
                    continue
            self._copies.wait_out(oldest)

    def _unpin_copied(self) -> None:
        for key in self._copies.take_ended():
            self._caches[key.bits].unpin(key)


def _least_recently(slots: int) -> Eviction:
    return EVICTIONS["lru"](EvictionContext(Clock(), slots, layers=1))
