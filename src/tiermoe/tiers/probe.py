"""A short look at the drive: does O_DIRECT pay here, how many lanes, and how fast is it."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tiermoe.errors import LoadError
from tiermoe.tiers.reader import ExtentReader, aligned_memory
from tiermoe.types import ExpertKey, Extent

SECONDS = 0.08
"""How long each setting is tried at most; the whole probe takes about five times as long."""
_WORTH = 1.1  # more lanes, or buffered reads, have to be a tenth faster


@dataclass(frozen=True, slots=True)
class DriveProbe:
    """How experts are read: `bandwidth` in bytes per second at that setting."""

    direct: bool
    lanes: int
    bandwidth: float


def probe_drive(extents: Sequence[Extent], lanes: int | None = None) -> DriveProbe:
    """Reads a sample of `extents` with O_DIRECT in 1, 2 and 4 lanes, then without it, each for `SECONDS` at most.
    `lanes` fixes their number. A sample that cannot be read, or is damaged, is left to whoever needs that expert."""
    samples = itertools.cycle(_spread(extents))
    best = DriveProbe(True, lanes or 1, 0.0)
    for count in (lanes,) if lanes else (1, 2, 4):
        bandwidth = _measure(ExtentReader(direct=True), samples, count)
        if bandwidth > best.bandwidth * _WORTH:
            best = DriveProbe(True, count, bandwidth)
    _drop_from_page_cache(extents)
    buffered = _measure(ExtentReader(direct=False), samples, best.lanes)
    if buffered > best.bandwidth * _WORTH:
        best = DriveProbe(False, best.lanes, buffered)
    return best


def _spread(extents: Sequence[Extent]) -> list[Extent]:
    """The extents in an order that jumps, so that neither read-ahead nor a drive's cache flatters the result."""
    stride = max(1, int(len(extents) * 0.618))
    while len(extents) % stride == 0 and stride > 1:
        stride -= 1
    return [extents[index * stride % len(extents)] for index in range(len(extents))]


def _measure(reader: ExtentReader, samples: itertools.cycle[Extent], lanes: int) -> float:
    """Bytes per second over all lanes."""
    lock = threading.Lock()
    deadline = time.perf_counter() + SECONDS

    def lane() -> None:
        memory = aligned_memory(0)
        while time.perf_counter() < deadline:
            with lock:
                extent = next(samples)
            needed = max(segment.at + segment.nbytes for segment in extent.segments)
            if len(memory) < needed:
                memory = aligned_memory(needed)
            with contextlib.suppress(LoadError):
                reader.read(extent, memory, ExpertKey(-1, -1, 0))

    started = time.perf_counter()
    threads = [threading.Thread(target=lane) for _ in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    reader.close()
    return reader.bytes_read / elapsed


def _drop_from_page_cache(extents: Sequence[Extent]) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    for file in {segment.file for extent in extents for segment in extent.segments}:
        with contextlib.suppress(OSError), open(file, "rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
