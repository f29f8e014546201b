"""Experts of a store held in main memory: read and checked once, copied from there afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from tiermoe.tiers.reader import ExtentReader, aligned_memory
from tiermoe.types import ExpertKey, Extent, Segment


class HeldReader:
    """Serves `experts` (extents of one segment) as `ExtentReader` does, from any number of threads at once.
    `bytes_read`: bytes copied since. LoadError where an expert cannot be read."""

    page = 1
    checked = True

    def __init__(self, reader: ExtentReader, experts: Iterable[tuple[ExpertKey, Extent]]) -> None:
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._held: dict[ExpertKey, tuple[int, memoryview]] = {}
        for key, extent in experts:
            (segment,) = extent.segments
            memory = aligned_memory(segment.nbytes)
            reader.read(extent, memory, key)
            self._held[key] = segment.offset, memory

    def read(self, extent: Extent, target: memoryview, key: ExpertKey) -> None:
        """Fills `target` with the extent's bytes."""
        for segment in extent.segments:
            self.read_part(segment, target, key)

    def read_part(self, part: Segment, target: memoryview, key: ExpertKey) -> None:
        """Fills its place in `target` with one part of an expert."""
        first, memory = self._held[key]
        at = part.offset - first
        target[part.at : part.at + part.nbytes] = memory[at : at + part.nbytes]
        with self._lock:
            self.bytes_read += part.nbytes

    def close(self) -> None:
        self._held.clear()
