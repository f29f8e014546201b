"""How fast a drive is, by reading what lies on it for a moment."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from tiermoe.config import MIB
from tiermoe.errors import LoadError
from tiermoe.offload.lanes import FIRST
from tiermoe.offload.reader import ExtentReader, aligned_memory
from tiermoe.types import ExpertKey, Extent

SECONDS = 0.2
"""How long is read at most."""
_READ = 4 * MIB  # of an extent, at most


def drive_rate(extents: Sequence[Extent], lanes: int = FIRST) -> float:
    """Bytes per second that `lanes` threads read together of `extents`, in an order that jumps, so that no read-ahead
    flatters the result. What cannot be read is left to whoever needs that expert."""
    stride = max(1, int(len(extents) * 0.618))
    reader, lock, taken = ExtentReader(), threading.Lock(), 0
    started = time.perf_counter()

    def lane() -> None:
        nonlocal taken
        memory = aligned_memory(_READ)
        while True:  # once at least: a lane may begin late
            with lock:
                taken += 1
                part = extents[taken * stride % len(extents)].segments[0]
            with contextlib.suppress(LoadError):
                reader.read_part(replace(part, nbytes=min(part.nbytes, _READ), at=0), memory, ExpertKey(-1, -1, 0))
            if time.perf_counter() >= started + SECONDS:
                return

    threads = [threading.Thread(target=lane) for _ in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    reader.close()
    return reader.bytes_read / elapsed
