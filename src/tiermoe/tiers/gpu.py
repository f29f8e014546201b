"""The GPU tier: disk → pinned slots in main memory → slots on the GPU.

Main memory is the second-level cache. Copies run beside the computation and are ordered against it by
events: a copy starts after the kernels launched before its load was submitted (they may still read the slot),
and the kernels launched after a load is handed out start after its copy. A lane waits for a copy where it
needs the pinned slot that is copied from, and for speculative ones; nobody waits for the device as a whole.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tiermoe.link import Finished
from tiermoe.policy.cache import ExpertCache
from tiermoe.policy.clock import Clock
from tiermoe.policy.eviction import EVICTIONS, EvictionContext
from tiermoe.policy.misses import averaged
from tiermoe.tiers.copier import Copier, Mark, Ticket
from tiermoe.tiers.lanes import Lanes
from tiermoe.tiers.slots import DeviceSlots, HostSlots
from tiermoe.types import Demand, ExpertKey, Load


class Filler(Protocol):
    """Reads experts into slots in main memory (`tiers.disk.SlotFiller`)."""

    @property
    def busy_s(self) -> float: ...

    @property
    def bytes_read(self) -> int: ...

    def fill(self, key: ExpertKey, slot: torch.Tensor) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy under way; its expert is pinned in main memory until it is done."""

    key: ExpertKey
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A load to be taken by `wait` or `poll`: its copy is asked for, or `error` says why not."""

    load: Load
    ticket: Ticket = None
    error: Exception | None = None


class GpuLink:
    """Implements `tiermoe.link.Link` with lanes that read experts into `host` slots and copies from there to
    `device` slots. bytes_of: bytes of an expert in its slot.

    An expert that is still in main memory is not read again; main memory evicts the expert that was copied
    longest ago, never one that is being read, copied or borrowed, whose slot is in use. `wait_s` adds up the time
    that the caller spent in `wait`, which does not wait for copies; `host_hits` and `host_misses` count what was
    found in main memory, to be copied or borrowed, and what was not.
    """

    def __init__(
        self,
        filler: Filler,
        host: HostSlots,
        device: DeviceSlots,
        bytes_of: Callable[[ExpertKey], int],
        copier: Copier,
        lanes: int,
    ) -> None:
        self.wait_s = 0.0
        self.bytes_copied = 0
        self.host_hits = 0
        self.host_misses = 0
        self._filler = filler
        self._host = host
        self._device = device
        self._bytes_of = bytes_of
        self._copier = copier
        context = EvictionContext(Clock(), host.count, layers=1)
        self._cache = ExpertCache(host.count, EVICTIONS["lru"](context))
        self._marks: dict[int, Mark] = {}
        self._copies: deque[_Copy] = deque()
        self._arrivals: deque[_Arrival] = deque()
        self._outstanding = 0  # submitted, and neither taken nor recalled, background loads apart
        self._changed = threading.Condition()
        self._lanes = Lanes(lanes, self._work)
        self._lane_count = lanes
        self._copy_s: float | None = None  # of the last copies, on average
        self._read_s = 0.0  # of the last reads, on average

    @property
    def seconds_per_load(self) -> float | None:
        """What a load takes of the link, as the last ones did: its copy, and its share of reading what main memory does
        not hold. None before the first copy."""
        if self._copy_s is None:
            return None
        read = self.host_misses / max(1, self.host_hits + self.host_misses)
        return self._copy_s + read * self._read_s / self._lane_count

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one lane was reading."""
        return self._filler.busy_s

    @property
    def bytes_read(self) -> int:
        """Bytes read from the drive so far."""
        return self._filler.bytes_read

    def submit(self, load: Load) -> None:
        self._outstanding += not load.background
        # whatever may still read the slot was launched before its load is submitted
        mark = self._copier.mark()
        if load.urgent and self._pin_if_here(load.key):
            self._copy(load, mark)  # no reading to do: without a lane's detour
            return
        with self._changed:
            self._marks[load.slot] = mark
        self._lanes.submit(load)

    def wait(self) -> Finished:
        started = time.perf_counter()
        with self._changed:
            while not self._arrivals:
                self._changed.wait()
            arrival = min(self._arrivals, key=lambda a: (not self._is_over(a.ticket), not a.load.urgent))
            self._arrivals.remove(arrival)
        finished = self._hand_out(arrival)
        self.wait_s += time.perf_counter() - started
        return finished

    def poll(self) -> Finished | None:
        with self._changed:
            # none whose copy is under way: all that is launched next would wait for it, needed or not
            arrival = next((a for a in self._arrivals if self._is_over(a.ticket)), None)
            if arrival is None:
                return None
            self._arrivals.remove(arrival)
        return self._hand_out(arrival)

    def recall(self) -> list[Load]:
        loads = self._lanes.recall()
        with self._changed:
            for load in loads:
                del self._marks[load.slot]
        self._outstanding -= len(loads)
        return loads

    def withdraw(self, key: ExpertKey) -> bool:
        load = self._lanes.withdraw(key)
        if load is None:
            return False
        with self._changed:
            del self._marks[load.slot]
        return True

    def is_idle(self) -> bool:
        return self._outstanding == 0

    def now(self) -> float:
        return time.perf_counter()

    def borrow(self, key: ExpertKey) -> torch.Tensor:
        """Expert `key` as it lies in main memory: its slot there, uint8 (slot_bytes,), kept until `give_back`. It is
        read first where it is not there, which waits for a slot. Any thread may call. LoadError where it cannot be
        read."""
        self._bring(key)
        with self._changed:
            slot = self._cache.slot(key)
        assert slot is not None
        return self._host.buffer(slot)

    def give_back(self, key: ExpertKey) -> None:
        """Ends one `borrow` of `key`: its slot in main memory may be taken again."""
        with self._changed:
            self._cache.unpin(key)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the lanes, drops what is queued, waits for the copies under way and gives the slots back. Nothing may
        be borrowed."""
        self._lanes.close()
        for copy in self._copies:
            self._wait_out(copy.ticket)
        self._filler.close()
        self._host.close()
        self._device.close()

    def _hand_out(self, arrival: _Arrival) -> Finished:
        self._outstanding -= not arrival.load.background
        if arrival.error is not None:
            return Finished(arrival.load, arrival.error)
        try:
            self._copier.wait_before_use(arrival.ticket)
        except Exception as failure:  # handed to whoever waits for the load
            return Finished(arrival.load, failure)
        return Finished(arrival.load)

    def _work(self, load: Load) -> None:
        """A lane's part: brings the expert into main memory and asks for its copy."""
        with self._changed:
            mark = self._marks.pop(load.slot)
        try:
            self._bring(load.key)
        except Exception as failure:  # handed to whoever waits for the load
            self._arrived(_Arrival(load, error=failure))
            return
        ticket = self._copy(load, mark)
        if ticket is not None and not load.urgent:
            self._wait_out(ticket)  # so that the speculative loads behind it can still be recalled

    def _pin_if_here(self, key: ExpertKey) -> bool:
        """Whether main memory holds `key`, which is then pinned until `_copy` is done."""
        with self._changed:
            if self._cache.slot(key) is None:
                return False
            self._cache.used(key, Demand(key.expert, 1, key.bits))
            self._cache.pin(key)
            self.host_hits += 1
            return True

    def _bring(self, key: ExpertKey) -> None:
        """Pins `key` in main memory, where it is read if it is not there yet."""
        while not self._pin_if_here(key):
            slot = self._reserve(key)
            if slot is not None:
                self._read(key, slot)
                return

    def _read(self, key: ExpertKey, slot: int) -> None:
        """Reads `key` into the slot that is reserved for it in main memory, and pins it there."""
        started = time.perf_counter()
        try:
            self._filler.fill(key, self._host.buffer(slot))
        except BaseException:
            with self._changed:
                self._cache.abandon(key)
                self._changed.notify_all()
            raise
        with self._changed:
            self._read_s = averaged(self._read_s or None, time.perf_counter() - started)
            self._cache.arrived(key)
            self._cache.pin(key)
            self._changed.notify_all()

    def _reserve(self, key: ExpertKey) -> int | None:
        """A slot in main memory for `key`; where all are in use, waits for the oldest copy, for a lane or for what is
        borrowed. None where another thread reads `key` meanwhile, once it is done."""
        while True:
            with self._changed:
                if self._cache.in_flight(key):
                    self._changed.wait_for(lambda: not self._cache.in_flight(key))
                    return None
                if self._cache.slot(key) is not None:
                    return None
                self._unpin_copied()
                slot = self._cache.reserve(key)
                if slot is not None:
                    self.host_misses += 1
                    return slot
                if not self._copies:
                    self._changed.wait()
                    continue
                oldest = self._copies[0]
            self._wait_out(oldest.ticket)

    def _copy(self, load: Load, mark: Mark) -> Ticket | None:
        """Asks for the copy of an expert that is pinned in main memory; None where that fails."""
        nbytes = self._bytes_of(load.key)
        with self._changed:
            slot = self._cache.slot(load.key)
        assert slot is not None
        try:
            source, target = self._host.buffer(slot)[:nbytes], self._device.buffer(load.slot)[:nbytes]
            ticket = self._copier.copy(source, target, mark)
        except Exception as failure:  # handed to whoever waits for the load
            with self._changed:
                self._cache.unpin(load.key)
            self._arrived(_Arrival(load, error=failure))
            return None
        with self._changed:
            self.bytes_copied += nbytes
            self._unpin_copied()
            self._copies.append(_Copy(load.key, ticket))
        self._arrived(_Arrival(load, ticket))
        return ticket

    def _arrived(self, arrival: _Arrival) -> None:
        with self._changed:
            self._arrivals.append(arrival)
            self._changed.notify_all()

    def _unpin_copied(self) -> None:
        under_way: deque[_Copy] = deque()
        for copy in self._copies:
            if self._is_over(copy.ticket):
                self._cache.unpin(copy.key)
                self._note_time(copy.ticket)
            else:
                under_way.append(copy)
        self._copies = under_way

    def _note_time(self, ticket: Ticket) -> None:
        with contextlib.suppress(Exception):  # of a copy that failed: `_hand_out` meets it
            self._copy_s = averaged(self._copy_s, self._copier.seconds(ticket))

    def _is_over(self, ticket: Ticket) -> bool:
        """True where there is nothing to wait for: no copy, one that is done, or one that has failed."""
        try:
            return ticket is None or self._copier.ready(ticket)
        except Exception:  # `_hand_out` meets it again, and hands it on
            return True

    def _wait_out(self, ticket: Ticket) -> None:
        """Until the copy is done or has failed; who takes the load meets the error."""
        try:
            self._copier.wait(ticket)
        except Exception:
            return
