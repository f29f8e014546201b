"""The link from disk into slots in main memory: a few reading lanes, urgent before speculative."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from tiermoe.link import Finished
from tiermoe.store.layout import ExpertFormat
from tiermoe.tiers.reader import ExtentReader, aligned_memory
from tiermoe.types import Extent, ExpertKey, Load


class Slots(Protocol):
    """Memory for experts."""

    def buffer(self, slot: int) -> torch.Tensor:
        """Slot `slot` as a uint8 tensor."""


class DiskLink:
    """Implements `tiermoe.link.Link` with threads that read extents into `slots`.

    extent_of: where an expert lies. format_of: its encodings, for the precisions that are widened while loading.
    `wait_s` adds up the time the caller spent in `wait`, `busy_s` the time in which at least one lane was reading.
    """

    def __init__(
        self,
        reader: ExtentReader,
        slots: Slots,
        extent_of: Callable[[ExpertKey], Extent],
        format_of: Callable[[ExpertKey], ExpertFormat],
        lanes: int,
    ) -> None:
        self.wait_s = 0.0
        self.busy_s = 0.0
        self._busy_since = 0.0
        self._reader = reader
        self._slots = slots
        self._extent_of = extent_of
        self._format_of = format_of
        self._urgent: deque[Load] = deque()
        self._speculative: deque[Load] = deque()
        self._finished: deque[Finished] = deque()
        self._running = 0
        self._closed = False
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._done = threading.Condition(lock)
        self._threads = [
            threading.Thread(target=self._lane, name=f"tiermoe-lane-{index}", daemon=True) for index in range(lanes)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def bytes_read(self) -> int:
        """Bytes read from the drive so far."""
        return self._reader.bytes_read

    def submit(self, load: Load) -> None:
        with self._work:
            (self._urgent if load.urgent else self._speculative).append(load)
            self._work.notify()

    def wait(self) -> Finished:
        started = time.perf_counter()
        with self._done:
            while not self._finished:
                self._done.wait()
            finished = self._finished.popleft()
        self.wait_s += time.perf_counter() - started
        return finished

    def poll(self) -> Finished | None:
        with self._done:
            return self._finished.popleft() if self._finished else None

    def recall(self) -> list[Load]:
        with self._work:
            loads = list(self._speculative)
            self._speculative.clear()
            return loads

    def is_idle(self) -> bool:
        with self._work:
            return not (self._urgent or self._speculative or self._running or self._finished)

    def close(self) -> None:
        """Ends the lanes; what is queued is dropped."""
        with self._work:
            self._closed = True
            self._urgent.clear()
            self._speculative.clear()
            self._work.notify_all()
        for thread in self._threads:
            thread.join()
        self._reader.close()

    def _lane(self) -> None:
        staging: memoryview | None = None
        while (load := self._take()) is not None:
            error: Exception | None = None
            try:
                staging = self._transfer(load, staging)
            except Exception as failure:  # handed to whoever waits for the load
                error = failure
            with self._done:
                self._running -= 1
                if self._running == 0:
                    self.busy_s += time.perf_counter() - self._busy_since
                self._finished.append(Finished(load, error))
                self._done.notify()

    def _take(self) -> Load | None:
        with self._work:
            while not (self._closed or self._urgent or self._speculative):
                self._work.wait()
            if self._closed:
                return None
            if self._running == 0:
                self._busy_since = time.perf_counter()
            self._running += 1
            return self._urgent.popleft() if self._urgent else self._speculative.popleft()

    def _transfer(self, load: Load, staging: memoryview | None) -> memoryview | None:
        """Reads one expert; returns the lane's staging memory, which only widened precisions use."""
        extent, form = self._extent_of(load.key), self._format_of(load.key)
        slot = self._slots.buffer(load.slot)
        if not form.widened:
            self._reader.read(extent, memoryview(slot.numpy()), load.key)
            return staging
        if staging is None or len(staging) < form.stored.nbytes:
            staging = aligned_memory(form.stored.nbytes)
        self._reader.read(extent, staging, load.key)
        form.widen(torch.frombuffer(staging, dtype=torch.uint8), slot)
        return staging
