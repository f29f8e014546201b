"""Experts of a store held in main memory: read and checked once, copied from there afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from tiermoe.tiers.reader import ExtentReader, aligned_memory
from tiermoe.types import ExpertKey, Extent, Segment


class HeldReader:
    """Serves `experts` as `ExtentReader` does, from any number of threads at once. Parts are served of experts that lie
    in one piece. `bytes_read`: bytes copied since. LoadError where an expert cannot be read."""

    page = 1
    checked = True

    def __init__(self, reader: ExtentReader, experts: Iterable[tuple[ExpertKey, Extent]]) -> None:
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._held: dict[ExpertKey, tuple[int, memoryview]] = {}
        for key, extent in experts:
            memory = aligned_memory(max(segment.at + segment.nbytes for segment in extent.segments))
            reader.read(extent, memory, key)
            self._held[key] = extent.segments[0].offset, memory

    def read(self, extent: Extent, target: memoryview, key: ExpertKey) -> None:
        """Fills `target` with the extent's bytes."""
        _, memory = self._held[key]
        target[: len(memory)] = memory
        self._count(extent.nbytes)

    def read_part(self, part: Segment, target: memoryview, key: ExpertKey) -> None:
        """Fills its place in `target` with one part of an expert."""
        first, memory = self._held[key]
        at = part.offset - first
        target[part.at : part.at + part.nbytes] = memory[at : at + part.nbytes]
        self._count(part.nbytes)

    def close(self) -> None:
        self._held.clear()

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes
