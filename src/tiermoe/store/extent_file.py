"""An extent written field by field and some rows at a time, where it would be too large to be held in memory."""

from __future__ import annotations

import os
from typing import IO

import torch
import xxhash

from tiermoe.quant.encoding import Field
from tiermoe.store.layout import Layout

_READ = 4 << 20  # bytes read back at a time for the checksum


class ExtentWriter:
    """Appends extents of one matrix each to a file. Gaps between fields are zeros."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._descriptor = handle.fileno()
        self._offset = self._end = 0
        self._places: dict[str, int] = {}

    def begin(self, layout: Layout) -> int:
        """Makes room for the next extent and returns its offset."""
        self._offset, self._end = self._end, self._end + layout.nbytes
        os.ftruncate(self._descriptor, self._end)
        self._places = {placed.field.name: self._offset + placed.offset for placed in layout.fields}
        return self._offset

    def write(self, field: Field, first: int, value: torch.Tensor) -> None:
        """Writes the values of `field` for some rows of the matrix, of which `first` is the first."""
        before, after = field.shape[: field.rows_at], field.shape[field.rows_at + 1 :]
        row = torch.Size(after).numel() * field.dtype.itemsize
        runs = value.contiguous().view(torch.Size(before).numel(), -1).view(torch.uint8).numpy()
        for index, run in enumerate(runs):
            at = self._places[field.name] + (index * field.shape[field.rows_at] + first) * row
            _write_fully(self._descriptor, run.data, at)

    def checksum(self) -> str:
        """The checksum of the extent begun last, read back from the file."""
        digest = xxhash.xxh3_64()
        start = self._offset
        while start < self._end:
            content = os.pread(self._descriptor, min(_READ, self._end - start), start)
            digest.update(content)
            start += len(content)
        return str(digest.hexdigest())


def _write_fully(descriptor: int, content: memoryview, offset: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], offset + done)
