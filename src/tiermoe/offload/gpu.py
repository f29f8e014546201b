"""The GPU tier: disk → pinned slots in main memory → slots on the GPU.

Main memory is the second-level cache (`HostCache`). Copies run during the computation and are ordered against it by
events: a copy starts after the kernels launched before its load was submitted (they may still read the slot), and the
kernels launched after a load is handed out start after its copy. An I/O thread waits for a copy if it needs the
pinned slot that is copied from, and for speculative ones; nobody waits for the device as a whole. Main memory is
filled in the background (`GpuLink.fill`).
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from tiermoe.errors import LoadError
from tiermoe.offload.cuda import CudaCopier, Mark, Ticket
from tiermoe.offload.disk import SlotFiller
from tiermoe.offload.io_threads import IOThreads
from tiermoe.offload.link import Finished, LinkCounters
from tiermoe.offload.policies.routing import averaged
from tiermoe.offload.second_level import SecondLevelCache
from tiermoe.offload.slots import HostSlots, Slots
from tiermoe.types import ExpertKey, Load

_IN_MAIN_MEMORY = -1
"""The slot of a load that ends in main memory."""


class CopyQueue:
    """Asks for copies and tells which are over. `lock` guards the queue; `changed`, its condition, is notified when a
    copy begins. Whoever takes part in the same waiting may guard state of its own with them. Of the copies that are
    known to be over (`take_ended`): `bytes_copied`; `copy_s`, their seconds; `seconds`, what the last ones took on
    average, None before the first."""

    def __init__(self, copier: CudaCopier) -> None:
        self.lock = threading.RLock()  # taken by itself: see `IOThreads`
        self.changed = threading.Condition(self.lock)
        self.bytes_copied = 0
        self.copy_s = 0.0
        self.seconds: float | None = None
        self._copier = copier
        self._under_way: deque[tuple[ExpertKey | None, int, Ticket]] = deque()  # with their bytes

    def __len__(self) -> int:
        return len(self._under_way)

    def start(
        self, key: ExpertKey | None, nbytes: int, work: Callable[[], object], after: Mark, urgent: bool
    ) -> Ticket:
        """Lets `work` launch a copy of so many bytes, which starts once `after` is reached. key: the expert that is
        pinned until it is over, if one is."""
        ticket = self._copier.launch(work, after, urgent)
        with self.lock:
            self._under_way.append((key, nbytes, ticket))
            self.changed.notify_all()
        return ticket

    def take_ended(self) -> list[ExpertKey]:
        """The experts that were pinned for copies that are over since the last call. The caller holds `lock`."""
        ended = [copy for copy in self._under_way if self.is_over(copy[2])]
        self._under_way = deque(copy for copy in self._under_way if copy not in ended)
        for _, nbytes, ticket in ended:
            with contextlib.suppress(Exception):  # of a copy that failed: `wait_before_use` meets it
                seconds = self._copier.seconds(ticket)
                self.seconds = averaged(self.seconds, seconds)
                self.copy_s += seconds
                self.bytes_copied += nbytes
        return [key for key, _, _ in ended if key is not None]

    def oldest(self) -> Ticket | None:
        """None if no copy is under way. The caller holds `lock`."""
        return self._under_way[0][2] if self._under_way else None

    def is_over(self, ticket: Ticket | None) -> bool:
        """True if there is nothing to wait for: no copy, one that is done, or one that has failed."""
        try:
            return ticket is None or self._copier.ready(ticket)
        except Exception:  # `wait_before_use` meets it again
            return True

    def wait_out(self, ticket: Ticket) -> None:
        """Blocks until the copy is done or has failed; who takes the load meets the error."""
        with contextlib.suppress(Exception):
            self._copier.wait(ticket)

    def finish(self) -> None:
        """Waits for the copies under way."""
        for _, _, ticket in self._under_way:
            self.wait_out(ticket)


class HostCache(SecondLevelCache):
    """The second-level cache in pinned memory, filled by `filler` and copied from by `copies`. Any thread may call.
    slots: of the experts of each precision; precisions may share slots.

    An expert that is read, copied or borrowed is pinned. `read_s`: what the last reads took on average, 0 before the
    first."""

    def __init__(self, filler: SlotFiller, slots: Mapping[int, HostSlots], copies: CopyQueue) -> None:
        shared: dict[HostSlots, list[int]] = {}
        for bits, run in slots.items():
            shared.setdefault(run, []).append(bits)
        super().__init__((precisions, run.count) for run, precisions in shared.items())
        self.read_s = 0.0
        self._filler = filler
        self._slots = slots
        self._copies = copies
        self._lock, self._changed = copies.lock, copies.changed

    def pin_if_here(self, key: ExpertKey) -> bool:
        with self._lock:
            return super().pin_if_here(key)

    def bring(self, key: ExpertKey) -> None:
        """Pins `key`, which is read if it is not here yet. LoadError if it cannot be read."""
        while not self.pin_if_here(key):
            slot = self._slot_for(key)
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
        """The slot of an expert, uint8 (slot_bytes,), kept until `give_back`. It is read first if it is not here,
        which waits for a slot. LoadError if it cannot be read."""
        self.bring(key)
        return self.buffer(key)

    def give_back(self, key: ExpertKey) -> None:
        """Ends one `borrow` or `bring`: the expert's slot may be taken again."""
        with self._lock:
            self.unpin(key)
            self._changed.notify_all()

    def fill(self, key: ExpertKey) -> None:
        """Reads `key` into a free slot, if there is one. If it cannot be read, whoever needs it meets the error."""
        with self._lock:
            slot = self.reserve_free(key)
        if slot is not None:
            with contextlib.suppress(LoadError):
                self._read(key, slot)
                self.give_back(key)

    def copy(
        self, key: ExpertKey, nbytes: int, target: torch.Tensor, after: Mark, urgent: bool, first: int = 0
    ) -> Ticket:
        """Asks for the copy of the `nbytes` bytes of a pinned expert, without the `first` ones. It is unpinned once
        that is over, or if asking fails."""
        try:
            source = self.buffer(key)[first:nbytes]
            work = functools.partial(target[first:nbytes].copy_, source, non_blocking=True)
            ticket = self._copies.start(key, source.nbytes, work, after, urgent)
        except Exception:
            self.give_back(key)
            raise
        self.unpin_copied()
        return ticket

    def unpin_copied(self) -> None:
        """Unpins the experts whose copies are over."""
        with self._lock:
            for key in self._copies.take_ended():
                self.unpin(key)

    def roll_back(self) -> None:
        """After an interruption of a caller anywhere: what is here stays, and nothing is in use. Nothing may be read,
        copied or borrowed."""
        self._filler.roll_back()
        with self._lock:
            self._copies.take_ended()  # whose pins go with all others
        for cache in set(self._caches.values()):
            cache.roll_back()

    def close(self) -> None:
        """Gives the slots back. Nothing may be read, copied or borrowed."""
        self._filler.close()
        for run in set(self._slots.values()):
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
            self.arrived(key)
            self._changed.notify_all()

    def _slot_for(self, key: ExpertKey) -> int | None:
        """A slot for `key`; if all are in use, waits for the oldest copy, for a thread or for what is borrowed. None
        if another thread reads `key` meanwhile, once it is done."""
        cache = self._caches[key.bits]
        while True:
            with self._lock:
                if self.being_read(key):
                    self._changed.wait_for(lambda: not self.being_read(key))
                    return None
                if cache.slot(key) is not None:
                    return None
                self.unpin_copied()
                slot = self.reserve(key)
                if slot is not None:
                    return slot
                oldest = self._copies.oldest()
                if oldest is None:
                    self._changed.wait()
                    continue
            self._copies.wait_out(oldest)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A load to be taken by `wait` or `poll`: its copy is asked for, or `error` says why not."""

    load: Load
    ticket: Ticket | None = None
    error: Exception | None = None


class GpuLink:
    """Implements `tiermoe.offload.link.Link` with I/O threads that read experts into `host` slots and copies from there
    to `device` slots. host: as `HostCache`. bytes_of: bytes of an expert in its slot.

    Waiting is what the caller spent in `wait`, which does not wait for copies, and what the stream of computation spent
    before kernels whose expert was still copied (`_stalls`: as far as that is not over, or not counted yet).
    """

    now = staticmethod(time.perf_counter)

    def __init__(
        self,
        filler: SlotFiller,
        host: Mapping[int, HostSlots],
        device: Slots,
        bytes_of: Callable[[ExpertKey], int],
        copier: CudaCopier,
        threads: int,
    ) -> None:
        self._wait_s = 0.0
        self._filler = filler
        self._device = device
        self._bytes_of = bytes_of
        self._copier = copier
        self._copies = CopyQueue(copier)
        self.host = HostCache(filler, host, self._copies)
        self._marks: dict[int, Mark] = {}
        self._ended: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._arrivals: deque[_Arrival] = deque()  # taken from there, and not handed out
        self._stalls: deque[Ticket] = deque()
        self._wanted: list[ExpertKey] = []
        self._threads = IOThreads(threads, self._work)
        self.lanes = threads

    @property
    def seconds_per_load(self) -> float | None:
        """What a load takes of the link, as the last ones did: its copy, and its share of reading what main memory does
        not hold. None before the first copy."""
        if self._copies.seconds is None:
            return None
        host = self.host
        read = host.misses / max(1, host.hits + host.misses)
        return self._copies.seconds + read * host.read_s / self.lanes

    def counters(self) -> LinkCounters:
        self.host.unpin_copied()
        self._count_stalls()
        copies, filler = self._copies, self._filler
        return LinkCounters(filler.bytes_read, filler.busy_s, self._wait_s, copies.bytes_copied, copies.copy_s)

    def fill(self, keys: Iterable[ExpertKey]) -> None:
        """Begins to read experts into free slots of main memory, in their order, while the threads have nothing else to
        do; nothing leaves for them. Without those that are in the background on their way to the GPU, which come to
        main memory so."""
        self._wanted = list(keys)
        for key in self._wanted:
            self._threads.submit(Load(key, _IN_MAIN_MEMORY, urgent=False, background=True))

    def submit(self, load: Load) -> None:
        # whatever may still read the slot was launched before its load is submitted
        mark = self._copier.mark()
        if load.urgent and self.host.pin_if_here(load.key):
            self._copy(load, mark)  # no reading to do: without a thread's detour
            return
        self._marks[load.slot] = mark
        self._threads.submit(load)

    def wait(self) -> Finished:
        started = time.perf_counter()
        if not self._arrivals:
            self._arrivals.append(self._ended.get())
        self._gather()
        arrival = min(self._arrivals, key=lambda a: (not self._copies.is_over(a.ticket), not a.load.urgent))
        self._arrivals.remove(arrival)
        finished = self._hand_out(arrival)
        self._wait_s += time.perf_counter() - started
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
        loads = self._threads.recall()
        for load in loads:
            del self._marks[load.slot]
        return loads

    def withdraw(self, key: ExpertKey) -> bool:
        load = self._threads.withdraw(key)
        if load is None:
            return False
        del self._marks[load.slot]
        return True

    def roll_back(self) -> None:
        with self._copies.lock:
            self._copies.changed.notify_all()  # who waits for what the interrupted thread was about to tell
        self._threads.drop()
        self._copies.finish()
        self.host.roll_back()
        self._marks.clear()
        self._arrivals.clear()
        self._ended = queue.SimpleQueue()
        self.fill(self._wanted)

    def close(self) -> None:
        """Ends the threads, drops what is queued, waits for the copies under way and gives the slots back. Nothing may
        be borrowed."""
        self._threads.close()
        self._copies.finish()
        self.host.close()
        self._device.close()

    def _gather(self) -> None:
        while not self._ended.empty():
            self._arrivals.append(self._ended.get())

    def _hand_out(self, arrival: _Arrival) -> Finished:
        if arrival.ticket is None:
            return Finished(arrival.load, arrival.error)
        try:
            self._before_use(arrival.ticket)
        except Exception as failure:  # handed to whoever waits for the load
            return Finished(arrival.load, failure)
        return Finished(arrival.load)

    def _before_use(self, ticket: Ticket) -> None:
        """Lets what is launched from now on start after a copy."""
        stall = self._copier.wait_before_use(ticket)
        if stall is not None:
            self._stalls.append(stall)
            self._count_stalls()

    def _count_stalls(self) -> None:
        """Adds the stalls that are over to the waiting, without waiting for the others."""
        with self._copies.lock:
            while self._stalls and self._copies.is_over(self._stalls[0]):
                with contextlib.suppress(Exception):  # of a GPU that failed: the next step meets it
                    self._wait_s += self._copier.seconds(self._stalls.popleft())

    def _work(self, load: Load) -> None:
        """An I/O thread's part: brings the expert into main memory and asks for its copy."""
        if load.slot == _IN_MAIN_MEMORY:
            self.host.fill(load.key)
            return
        mark = self._marks.pop(load.slot)
        try:
            self.host.bring(load.key)
        except Exception as failure:  # handed to whoever waits for the load
            self._ended.put(_Arrival(load, error=failure))
            return
        ticket = self._copy(load, mark)
        if ticket is not None and not load.urgent:
            self._copies.wait_out(ticket)  # so that the speculative loads after it can still be recalled

    def _copy(self, load: Load, mark: Mark) -> Ticket | None:
        """Asks for the copy of an expert that is pinned in main memory; None if that fails."""
        try:
            ticket = self._transfer(load, mark)
        except Exception as failure:  # handed to whoever waits for the load
            self._ended.put(_Arrival(load, error=failure))
            return None
        self._ended.put(_Arrival(load, ticket))
        return ticket

    def _transfer(self, load: Load, mark: Mark) -> Ticket:
        """Asks for the copy of an expert that is pinned in main memory, and unpins it once that is over or has
        failed."""
        return self.host.copy(load.key, self._bytes_of(load.key), self._device.buffer(load.slot), mark, load.urgent)
