"""Links from disk into slots in main memory: a few I/O threads, urgent loads first, speculative ones next, background
last.

Native threads read and check whole experts without the interpreter (`NativeDiskLink`). Threads of Python do what needs
it (`DiskLink`): codes that are rearranged in the slot, neurons, experts served from memory, a build without kernels.
"""

from __future__ import annotations

import contextlib
import os
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from tiermoe.config import MIB, Settings
from tiermoe.errors import LoadError
from tiermoe.formats.expert_format import PAGE, ExpertFormat, align
from tiermoe.native import _native
from tiermoe.offload.io_threads import IOThreads
from tiermoe.offload.lanes import MOST, Lanes
from tiermoe.offload.link import Finished, LinkCounters
from tiermoe.offload.reader import ExtentReader, aligned_memory, damaged, unreadable, verify
from tiermoe.offload.second_drive import TwoDrives
from tiermoe.offload.slots import FilledSlots
from tiermoe.types import ExpertKey, Extent, Load, Segment

LANES = 4  # threads where nothing is learned: 1 to 4 were equally fast from the page cache
_MOST_THREADS = 64  # io.c
_STAGED = 48 * MIB  # that the buffers of more threads than these take at the most


def few_lanes(settings: Settings) -> int:
    """Threads that read experts where their number is not learned."""
    return min((settings.lanes or LANES) * (1 if settings.also is None else 2), _MOST_THREADS)


def most_lanes(settings: Settings, formats: Sequence[ExpertFormat]) -> int:
    """Threads that read experts with these settings, at the most."""
    if settings.lanes:
        return few_lanes(settings)
    buffers = _buffers(formats)
    most = max(LANES, min(MOST, _STAGED // buffers)) if buffers else MOST
    return most * (1 if settings.also is None else 2)


def staging_bytes(formats: Sequence[ExpertFormat], lanes: int) -> int:
    """What I/O threads have besides the slots."""
    return lanes * _buffers(formats)


def _buffers(formats: Sequence[ExpertFormat]) -> int:
    """Bytes that a thread has besides the slots: a bounce buffer for experts served from the checkpoint in place, if
    their offsets are not aligned, and the stored bytes of codes that are rearranged in the slot."""
    buffers = any(form.bits == 16 for form in formats) + any(form.widened for form in formats)
    return buffers * (align(max(form.stored.nbytes for form in formats), PAGE) + PAGE)


class Reader(Protocol):
    """Reads the extents of experts (`offload.reader`, `offload.second_drive.TwoDrives`)."""

    bytes_read: int

    def read(self, extent: Extent, target: memoryview, key: ExpertKey) -> None:
        """Fills `target` (page-aligned, writable) with the extent's bytes, verified. LoadError if it cannot."""

    def close(self) -> None: ...


class SlotFiller:
    """Reads experts from disk into slots in main memory, from any number of threads at once.

    extent_of: where an expert lies. format_of: its encodings, for codes that are rearranged while loading (AWQ's and
    GPTQ's). reads_as_stored: whether a filled slot has the stored bytes of a whole expert, whatever the expert.
    """

    def __init__(
        self,
        reader: Reader,
        extent_of: Callable[[ExpertKey], Extent],
        format_of: Callable[[ExpertKey], ExpertFormat],
        reads_as_stored: bool = False,
    ) -> None:
        self.reader = reader
        self.extent_of = extent_of
        self.format_of = format_of
        self.reads_as_stored = reads_as_stored
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
        return self.reader.bytes_read

    def fill(self, key: ExpertKey, slot: torch.Tensor) -> None:
        """Reads expert `key` into `slot` (uint8, page-aligned). LoadError if it cannot be read."""
        with self._reading():
            self._read(key, slot)

    def roll_back(self) -> None:
        """Nobody reads any more: who was interrupted while reading does not count as a reader."""
        with self._lock:
            self._readers = 0

    def close(self) -> None:
        self.reader.close()

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
        extent, form = self.extent_of(key), self.format_of(key)
        if not form.widened:
            self.reader.read(extent, slot.numpy().data, key)
            form.round_biases(slot)
            return
        staging = self._staged(form.stored.nbytes)
        self.reader.read(extent, staging, key)
        form.widen(torch.frombuffer(staging, dtype=torch.uint8), slot)

    def _staged(self, nbytes: int) -> memoryview:
        """Page-aligned memory of the calling thread, its contents valid until asked for again."""
        staging: memoryview | None = getattr(self._staging, "memory", None)
        if staging is None or len(staging) < nbytes:
            staging = self._staging.memory = aligned_memory(nbytes)
        return staging


class DiskLink:
    """Fills `slots` by `threads` threads of Python (`offload.link.MeteredLink`)."""

    now = staticmethod(time.perf_counter)

    def __init__(self, filler: SlotFiller, slots: FilledSlots, threads: int) -> None:
        self.lanes = threads
        self._wait_s = 0.0
        self._filler = filler
        self._slots = slots
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._threads = IOThreads(threads, self._work)

    def counters(self) -> LinkCounters:
        return LinkCounters(self._filler.bytes_read, self._filler.busy_s, self._wait_s)

    def submit(self, load: Load) -> None:
        self._threads.submit(load)

    def wait(self) -> Finished:
        started = time.perf_counter()
        finished = self._finished.get()
        self._wait_s += time.perf_counter() - started
        return finished

    def poll(self) -> Finished | None:
        try:
            return self._finished.get_nowait()
        except queue.Empty:
            return None

    def recall(self) -> list[Load]:
        return self._threads.recall()

    def withdraw(self, key: ExpertKey) -> bool:
        return self._threads.withdraw(key) is not None

    def roll_back(self) -> None:
        self._threads.drop()
        self._filler.roll_back()
        self._finished = queue.SimpleQueue()

    def close(self) -> None:
        """Ends the threads, drops what is queued and gives the slots back."""
        self._threads.close()
        self._filler.close()
        self._slots.close()

    def _work(self, load: Load) -> None:
        error: Exception | None = None
        try:
            self._filler.fill(load.key, self._slots.place(load.slot, load.key))
        except Exception as failure:  # handed to whoever waits for the load
            error = failure
        self._finished.put(Finished(load, error))


_CACHED, _DROPPED, _DIRECT, _MAPPED = range(4)  # io.c: How
_DONE, _SYSTEM, _, _DAMAGED = range(4)  # io.c: Outcome, and ENDS_EARLY
_SHORT = 240  # bytes: the native checksum takes more
_REQUEST = struct.Struct("=Qii")
_PIECE = struct.Struct("=qqqiiii")
_NO_COPY = -1, _CACHED
_AT_LEAST = 32  # loads between two looks at a window that goes on


class NativeDiskLink:
    """Fills `slots` by `threads` native threads (`native/io.c`; `offload.link.MeteredLink`). A thread that waits reads
    an urgent load that has not begun by itself.

    reader: opens the files. extent_of: where an expert lies. format_of: its encodings, none of them `widened`. threads:
    a number, or what learns how many of them read at once. mapped: slots are parts of mapped files, whose pages are
    brought in."""

    now = staticmethod(time.perf_counter)

    def __init__(
        self,
        reader: ExtentReader,
        slots: FilledSlots,
        extent_of: Callable[[ExpertKey], Extent],
        format_of: Callable[[ExpertKey], ExpertFormat],
        threads: int | Lanes,
        mapped: bool = False,
    ) -> None:
        self._reader = reader
        self._slots = slots
        self._extent_of = extent_of
        self._format_of = format_of
        self._mapped = mapped
        self._second = reader.second if isinstance(reader, TwoDrives) else None
        learned = self._learned = threads if isinstance(threads, Lanes) else None
        self._most = threads.most if isinstance(threads, Lanes) else threads
        self._threads = _native.IOThreads(self._most, self._second.ratio if self._second is not None else 0.0)
        self._until_window = -1  # loads that end before the window of reads is looked at
        if learned is not None:
            self._until_window = learned.reads
            self._threads.allow(learned.limit, learned.floor)
        self._next = 0
        self._loads: dict[int, Load] = {}  # by number: submitted, and neither taken nor recalled
        self._background: dict[ExpertKey, int] = {}  # numbers
        self._requests: dict[ExpertKey, bytes] = {}
        self._completed: set[ExpertKey] = set()  # by this thread, once they are read: see `_completion`
        self._failed: deque[Finished] = deque()  # whose files cannot be opened

    @property
    def lanes(self) -> int:
        return self._most if self._learned is None else self._learned.limit

    def counters(self) -> LinkCounters:
        return LinkCounters(*self._threads.counters())

    def submit(self, load: Load) -> None:
        key, slot, urgent, background = load
        number = self._next
        self._next, self._loads[number] = number + 1, load
        if background:
            self._background[key] = number
        try:
            request = self._requests.get(key) or self._request(key)
            address = self._slots.address(slot, key)
        except OSError as error:
            self._failed.append(self._taken(number, _error(key, self._extent_of(key), _SYSTEM, 0, error.errno or 0)))
            return
        except Exception as error:  # handed to whoever waits for the load
            self._failed.append(self._taken(number, error))
            return
        self._threads.submit(number, 2 if background else 1 - urgent, address, request)

    def wait(self) -> Finished:
        return self._failed.popleft() if self._failed else self._handed_out(self._threads.wait())

    def poll(self) -> Finished | None:
        if self._failed:
            return self._failed.popleft()
        ended = self._threads.poll()
        return None if ended is None else self._handed_out(ended)

    def recall(self) -> list[Load]:
        return [self._loads.pop(number) for number in self._threads.recall()]

    def withdraw(self, key: ExpertKey) -> bool:
        number = self._background.get(key)
        if number is None or not self._threads.withdraw(number):
            return False
        del self._background[key], self._loads[number]
        return True

    def roll_back(self) -> None:
        self._threads.drop()
        self._loads.clear()
        self._background.clear()
        self._failed.clear()

    def close(self) -> None:
        """Ends the threads, drops what is queued and gives the slots back."""
        self._threads.close()
        self._reader.close()
        self._slots.close()

    def _request(self, key: ExpertKey) -> bytes:
        """What the threads are given of an expert, once."""
        extent = self._extent_of(key)
        checked = bool(extent.checksum) and extent.nbytes > _SHORT
        if extent.nbytes <= _SHORT or self._format_of(key).vectors:
            self._completed.add(key)
        parts = [_REQUEST.pack(int(extent.checksum, 16) if checked else 0, checked, len(extent.segments))]
        copied = [_NO_COPY] * len(extent.segments)
        if self._second is not None and extent.nbytes > _SHORT:
            copy = self._second.copy_of(extent, key)
            copied = copied if copy is None else [self._opened(self._second.reader, each) for each in copy.segments]
        for segment, place in zip(extent.segments, copied, strict=True):
            first = self._opened(self._reader, segment)
            parts.append(_PIECE.pack(segment.offset, segment.nbytes, segment.at, *first, *place))
        request = self._requests[key] = b"".join(parts)
        return request

    def _opened(self, reader: ExtentReader, segment: Segment) -> tuple[int, int]:
        """(descriptor, how it is read) of a segment's file."""
        file, direct = reader.open(segment.file)
        return file, _MAPPED if self._mapped else _DIRECT if direct else _CACHED if reader.keep else _DROPPED

    def _handed_out(self, ended: int | tuple[int, int, int, int, int]) -> Finished:
        self._until_window -= 1
        if self._until_window == 0:
            self._end_window()
        error = None
        if isinstance(ended, tuple):
            ended, outcome, piece, detail, drive = ended
            key = self._loads[ended].key
            extent, second = self._extent_of(key), self._second
            if not drive or second is None:
                error = _error(key, extent, outcome, piece, detail)
            elif outcome == _DONE:
                second.record(extent.nbytes)
            else:
                copy = second.copy_of(extent, key) or extent
                second.leave_out(key, _error(key, copy, outcome, piece, detail))
                del self._requests[key]
        load = self._loads.pop(ended)
        if load.background:
            del self._background[load.key]
        if error is None and load.key in self._completed:
            error = self._completion(load)
        return Finished(load, error)

    def _end_window(self) -> None:
        """Tells what the threads have read at once, if that is enough, and how many are to do so next."""
        learned = self._learned
        assert learned is not None
        nbytes, seconds, reads = self._threads.crowded()
        if reads >= learned.reads:
            learned.record(nbytes, seconds)
            self._threads.allow(learned.limit, learned.floor)
            reads = 0
        self._until_window = max(learned.reads - reads, _AT_LEAST)

    def _completion(self, load: Load) -> LoadError | None:
        """Does what the native threads leave: the checksum of a short extent, rounding biases. Returns what fails."""
        extent, form = self._extent_of(load.key), self._format_of(load.key)
        slot = self._slots.buffer(load.slot)
        try:
            if extent.nbytes <= _SHORT:
                verify(extent, slot.numpy().data, load.key)
        except LoadError as error:
            return error
        form.round_biases(slot)
        return None

    def _taken(self, number: int, error: Exception) -> Finished:
        load = self._loads.pop(number)
        if load.background:
            del self._background[load.key]
        return Finished(load, error)


def _error(key: ExpertKey, extent: Extent, outcome: int, piece: int, detail: int) -> LoadError:
    """What the native threads say of an expert that was read from `extent`."""
    if outcome == _DAMAGED:
        return damaged(str(key), extent.segments[0].file)
    why = os.strerror(detail) if outcome == _SYSTEM else f"the file ends {detail:,} bytes early"
    return unreadable(key, extent.segments[piece], why)
