"""The link from disk into slots in main memory: a few reading lanes, urgent before speculative, background last."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from tiermoe.decide.link import Finished
from tiermoe.store.layout import PAGE, ExpertFormat, align
from tiermoe.tiers.lanes import Lanes
from tiermoe.tiers.reader import aligned_memory
from tiermoe.types import ExpertKey, Extent, Load

LANES = 4  # the most that the drive's probe chooses


def staging_bytes(formats: Sequence[ExpertFormat], lanes: int) -> int:
    """What reading lanes hold beside the slots: a bounce buffer for experts served from the checkpoint in place, whose
    offsets are not aligned, and the stored bytes of codes that are rearranged in the slot."""
    buffers = any(form.bits == 16 for form in formats) + any(form.widened for form in formats)
    return buffers * lanes * (align(max(form.stored.nbytes for form in formats), PAGE) + PAGE)


class Slots(Protocol):
    """Memory for experts."""

    def buffer(self, slot: int) -> torch.Tensor:
        """Slot `slot` as a uint8 tensor."""

    def close(self) -> None:
        """Gives the memory back once no view of a slot is left."""


class FilledSlots(Slots, Protocol):
    """Slots that reading lanes fill."""

    def place(self, slot: int, key: ExpertKey) -> torch.Tensor:
        """Where expert `key` is brought for slot `slot`, uint8 and page-aligned: `buffer(slot)` once it is there."""


class Reader(Protocol):
    """Reads the extents of experts (`tiers.reader.ExtentReader`, `tiers.reader.HeldReader`)."""

    bytes_read: int

    def read(self, extent: Extent, target: memoryview, key: ExpertKey) -> None:
        """Fills `target` (page-aligned, writable) with the extent's bytes, verified. LoadError where it cannot."""

    def close(self) -> None: ...


class SlotFiller:
    """Reads experts from disk into slots in main memory, from any number of threads at once.

    extent_of: where an expert lies. format_of: its encodings, for codes that are rearranged while loading (AWQ's and
    GPTQ's).
    """

    def __init__(
        self,
        reader: Reader,
        extent_of: Callable[[ExpertKey], Extent],
        format_of: Callable[[ExpertKey], ExpertFormat],
    ) -> None:
        self._reader = reader
        self._extent_of = extent_of
        self._format_of = format_of
        self._staging = threading.local()
        self._lock = threading.Lock()
        self._readers = 0
        self._busy_s = 0.0  # until the last time that nobody read
        self._busy_since = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one thread was reading, until now."""
        with self._lock:
            return self._busy_s + (time.perf_counter() - self._busy_since if self._readers else 0.0)

    @property
    def bytes_read(self) -> int:
        """Bytes read from the drive so far."""
        return self._reader.bytes_read

    def fill(self, key: ExpertKey, slot: torch.Tensor) -> None:
        """Reads expert `key` into `slot` (uint8, page-aligned). LoadError where it cannot be read."""
        with self._reading():
            self._read(key, slot)

    def roll_back(self) -> None:
        """Nobody reads any more: who was interrupted while reading does not count as a reader."""
        with self._lock:
            self._readers = 0

    def close(self) -> None:
        self._reader.close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            if self._readers == 0:
                self._busy_since = time.perf_counter()
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
                if self._readers == 0:
                    self._busy_s += time.perf_counter() - self._busy_since

    def _read(self, key: ExpertKey, slot: torch.Tensor) -> None:
        extent, form = self._extent_of(key), self._format_of(key)
        if not form.widened:
            self._reader.read(extent, slot.numpy().data, key)
            form.settle(slot)
            return
        staging = self._staged(form.stored.nbytes)
        self._reader.read(extent, staging, key)
        form.widen(torch.frombuffer(staging, dtype=torch.uint8), slot)

    def _staged(self, nbytes: int) -> memoryview:
        """Page-aligned memory of the calling thread, its contents valid until asked for again."""
        staging: memoryview | None = getattr(self._staging, "memory", None)
        if staging is None or len(staging) < nbytes:
            staging = self._staging.memory = aligned_memory(nbytes)
        return staging


class DiskLink:
    """Implements `tiermoe.decide.link.Link` with lanes that read experts into `slots`. `wakes`: how often `wait` had to
    wait; `wake_s`: seconds from the end of what it waited for until it went on."""

    def __init__(self, filler: SlotFiller, slots: FilledSlots, lanes: int) -> None:
        self.wait_s = 0.0
        self.wakes = 0
        self.wake_s = 0.0
        self._filler = filler
        self._slots = slots
        self._finished: queue.SimpleQueue[tuple[Finished, float]] = queue.SimpleQueue()  # and when it ended
        self._outstanding = 0  # submitted, and neither taken nor recalled, background loads apart
        self._lanes = Lanes(lanes, self._work)

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one lane was reading."""
        return self._filler.busy_s

    @property
    def bytes_read(self) -> int:
        """Bytes read from the drive so far."""
        return self._filler.bytes_read

    @property
    def lanes(self) -> Lanes:
        """The threads that read."""
        return self._lanes

    def submit(self, load: Load) -> None:
        self._outstanding += not load.background
        self._lanes.submit(load)

    def wait(self) -> Finished:
        started = time.perf_counter()
        finished, ended = self._finished.get()
        now = time.perf_counter()
        self._outstanding -= not finished.load.background
        self.wait_s += now - started
        if ended > started:
            self.wakes += 1
            self.wake_s += now - ended
        return finished

    def poll(self) -> Finished | None:
        try:
            finished, _ = self._finished.get_nowait()
        except queue.Empty:
            return None
        self._outstanding -= not finished.load.background
        return finished

    def recall(self) -> list[Load]:
        loads = self._lanes.recall()
        self._outstanding -= len(loads)
        return loads

    def withdraw(self, key: ExpertKey) -> bool:
        return self._lanes.withdraw(key) is not None

    def is_idle(self) -> bool:
        return self._outstanding == 0

    def roll_back(self) -> None:
        self._lanes.drop()
        self._filler.roll_back()
        self._finished = queue.SimpleQueue()
        self._outstanding = 0

    def now(self) -> float:
        return time.perf_counter()

    def close(self) -> None:
        """Ends the lanes, drops what is queued and gives the slots back."""
        self._lanes.close()
        self._filler.close()
        self._slots.close()

    def _work(self, load: Load) -> None:
        error: Exception | None = None
        try:
            self._filler.fill(load.key, self._slots.place(load.slot, load.key))
        except Exception as failure:  # handed to whoever waits for the load
            error = failure
        self._finished.put((Finished(load, error), time.perf_counter()))
