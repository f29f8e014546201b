"""The GPU tier: disk → pinned slots in main memory → slots on the GPU.

Main memory is the second-level cache (`host_cache`). Copies run beside the computation and are ordered against it by
events: a copy starts after the kernels launched before its load was submitted (they may still read the slot),
and the kernels launched after a load is handed out start after its copy. A lane waits for a copy where it
needs the pinned slot that is copied from, and for speculative ones; nobody waits for the device as a whole.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tiermoe.decide.link import Finished
from tiermoe.tiers.copier import Copier, Mark, Ticket
from tiermoe.tiers.copies import CopyQueue
from tiermoe.tiers.disk import Slots
from tiermoe.tiers.host_cache import Filler, HostCache
from tiermoe.tiers.lanes import Lanes
from tiermoe.tiers.slots import HostSlots
from tiermoe.types import ExpertKey, Load


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A load to be taken by `wait` or `poll`: its copy is asked for, or `error` says why not."""

    load: Load
    ticket: Ticket = None
    error: Exception | None = None


class GpuLink:
    """Implements `tiermoe.decide.link.Link` with lanes that read experts into `host` slots and copies from there to
    `device` slots. host: as `HostCache`. bytes_of: bytes of an expert in its slot.

    `wait_s` adds up the time that the caller spent in `wait`, which does not wait for copies.
    """

    def __init__(
        self,
        filler: Filler,
        host: Mapping[int, HostSlots],
        device: Slots,
        bytes_of: Callable[[ExpertKey], int],
        copier: Copier,
        lanes: int,
    ) -> None:
        self.wait_s = 0.0
        self._filler = filler
        self._device = device
        self._bytes_of = bytes_of
        self._copies = CopyQueue(copier)
        self.host = HostCache(filler, host, self._copies)
        self._marks: dict[int, Mark] = {}
        self._ended: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._arrivals: deque[_Arrival] = deque()  # taken from there, and not handed out
        self._outstanding = 0  # submitted, and neither taken nor recalled, background loads apart
        self._lanes = Lanes(lanes, self._work)
        self._lane_count = lanes

    @property
    def seconds_per_load(self) -> float | None:
        """What a load takes of the link, as the last ones did: its copy, and its share of reading what main memory does
        not hold. None before the first copy."""
        if self._copies.seconds is None:
            return None
        host = self.host
        read = host.misses / max(1, host.hits + host.misses)
        return self._copies.seconds + read * host.read_s / self._lane_count

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one lane was reading."""
        return self._filler.busy_s

    @property
    def bytes_read(self) -> int:
        """Bytes read from the drive so far."""
        return self._filler.bytes_read

    @property
    def bytes_copied(self) -> int:
        """Bytes copied to the GPU so far."""
        return self._copies.bytes_copied

    def submit(self, load: Load) -> None:
        self._outstanding += not load.background
        # whatever may still read the slot was launched before its load is submitted
        mark = self._copies.mark()
        if load.urgent and self.host.pin_if_here(load.key):
            self._copy(load, mark)  # no reading to do: without a lane's detour
            return
        self._marks[load.slot] = mark
        self._lanes.submit(load)

    def wait(self) -> Finished:
        started = time.perf_counter()
        if not self._arrivals:
            self._arrivals.append(self._ended.get())
        self._gather()
        arrival = min(self._arrivals, key=lambda a: (not self._copies.is_over(a.ticket), not a.load.urgent))
        self._arrivals.remove(arrival)
        finished = self._hand_out(arrival)
        self.wait_s += time.perf_counter() - started
        return finished

    def poll(self) -> Finished | None:
        self._gather()
        # none whose copy is under way: all that is launched next would wait for it, needed or not
        arrival = next((a for a in self._arrivals if self._copies.is_over(a.ticket)), None)
        if arrival is None:
            return None
        self._arrivals.remove(arrival)
        return self._hand_out(arrival)

    def recall(self) -> list[Load]:
        loads = self._lanes.recall()
        for load in loads:
            del self._marks[load.slot]
        self._outstanding -= len(loads)
        return loads

    def withdraw(self, key: ExpertKey) -> bool:
        load = self._lanes.withdraw(key)
        if load is None:
            return False
        del self._marks[load.slot]
        return True

    def is_idle(self) -> bool:
        return self._outstanding == 0

    def roll_back(self) -> None:
        with self._copies.lock:
            self._copies.changed.notify_all()  # who waits for what the interrupted thread was about to tell
        self._lanes.drop()
        self._copies.finish()
        self.host.roll_back()
        self._marks.clear()
        self._arrivals.clear()
        self._ended = queue.SimpleQueue()
        self._outstanding = 0

    def now(self) -> float:
        return time.perf_counter()

    def close(self) -> None:
        """Ends the lanes, drops what is queued, waits for the copies under way and gives the slots back. Nothing may
        be borrowed."""
        self._lanes.close()
        self._copies.finish()
        self.host.close()
        self._device.close()

    def _gather(self) -> None:
        while not self._ended.empty():
            self._arrivals.append(self._ended.get())

    def _hand_out(self, arrival: _Arrival) -> Finished:
        self._outstanding -= not arrival.load.background
        if arrival.error is not None:
            return Finished(arrival.load, arrival.error)
        try:
            self._copies.wait_before_use(arrival.ticket)
        except Exception as failure:  # handed to whoever waits for the load
            return Finished(arrival.load, failure)
        return Finished(arrival.load)

    def _work(self, load: Load) -> None:
        """A lane's part: brings the expert into main memory and asks for its copy."""
        mark = self._marks.pop(load.slot)
        try:
            self.host.bring(load.key)
        except Exception as failure:  # handed to whoever waits for the load
            self._ended.put(_Arrival(load, error=failure))
            return
        ticket = self._copy(load, mark)
        if ticket is not None and not load.urgent:
            self._copies.wait_out(ticket)  # so that the speculative loads behind it can still be recalled

    def _copy(self, load: Load, mark: Mark) -> Ticket | None:
        """Asks for the copy of an expert that is pinned in main memory; None where that fails."""
        try:
            ticket = self.host.copy(load.key, self._bytes_of(load.key), self._device.buffer(load.slot), mark)
        except Exception as failure:  # handed to whoever waits for the load
            self._ended.put(_Arrival(load, error=failure))
            return None
        self._ended.put(_Arrival(load, ticket))
        return ticket
