"""Files of a store's folder: written by one process at a time, whole or not at all, extents field by field.

The data of a file of experts starts at a 4 KiB boundary, extent after extent. The safetensors format allows a header
padded with spaces, and wants no holes between tensors: the gaps inside an extent are named `….padding.N` tensors, so
that any safetensors reader opens the file.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
import xxhash

from tiermoe.config import format_size
from tiermoe.errors import PackError
from tiermoe.formats.encoding import Field
from tiermoe.formats.expert_format import PAGE, Layout, align
from tiermoe.formats.stores import LOCK
from tiermoe.platform import file_io

PARTIAL = ".partial"

PIECE = 2 << 20
"""Bytes of a huge page. Linux caches what is written so many at a time, at multiples of it, in huge pages, and what is
written in smaller pieces in small ones, until it is read from the drive again: kernels over a store's mapped files are
up to a fifth slower then (notebook/2026-11-21-warm-start.md)."""

_READ = 4 << 20  # bytes read back at a time for the checksum
_DTYPE_NAMES = {
    torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
}  # fmt: skip

_ELSEWHERE = "choose another folder with --store"
_POLL_S = 0.2
_PROGRESS = re.compile(rb"(\d{1,10}) (\d{1,10}) (\d{1,10})\n")  # process, done, in all
_PROGRESS_BYTES = 64

Progress = Callable[[int, int], None]
"""Called with (done, in all)."""

Waiting = Callable[[str, int, int], None]
"""Called with (the process that is waited for, what it has done, in all)."""


@contextlib.contextmanager
def exclusive(root: Path, waiting: Waiting | None = None) -> Iterator[Progress]:
    """Takes the lock of a store's folder and removes unfinished files of an interrupted process. Yields a function that
    records progress in the lock's file. Waits for another process that has the lock, and calls `waiting` with that
    process's progress meanwhile. PackError says what to do where the folder cannot be written or the disk fills."""
    with _as_pack_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        descriptor = file_io.open_to_write(root / LOCK)
        try:
            _take_lock(descriptor, waiting or (lambda whom, done, total: None))
            record = functools.partial(_record_progress, descriptor)
            record(0, 1)
            for name in ("store", "packing-*", "experts-*", "dense-*"):
                for unfinished in root.glob(name + PARTIAL):
                    unfinished.unlink()
            yield record
        finally:
            os.close(descriptor)


def _take_lock(descriptor: int, waiting: Waiting) -> None:
    whom, total = "", 1
    while True:
        try:
            file_io.lock(descriptor)
        except BlockingIOError:
            recorded = _PROGRESS.match(file_io.read_bytes_at(descriptor, _PROGRESS_BYTES, 0))
            if recorded:  # else the process that has the lock is about to write it
                process, done, total = (int(number) for number in recorded.groups())
                whom = f"waiting for process {process}, which packs into the same folder"
                waiting(whom, done, total)
            time.sleep(_POLL_S)
        else:
            break
    if whom:
        waiting(whom, total, total)


def _record_progress(descriptor: int, done: int, total: int) -> None:
    """Writes into the lock's file, for processes that wait, which process has the lock and how far it is."""
    file_io.write_at(descriptor, f"{os.getpid()} {done} {total}\n".ljust(_PROGRESS_BYTES).encode(), 0)


@contextlib.contextmanager
def _as_pack_errors(root: Path) -> Iterator[None]:
    """Raises a system's error as a PackError that says what to do."""
    try:
        yield
    except BrokenPipeError:  # of the terminal that progress is written to
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise PackError(
                f"the disk filled while packing into {root} ({_free(root)} free; {error.strerror}); free some "
                f"space and run again: what is finished is kept, or {_ELSEWHERE}"
            ) from error
        if error.errno == errno.EIO:
            raise PackError(f"writing to {root} failed: {error.strerror}; check the drive, or {_ELSEWHERE}") from error
        raise PackError(f"cannot write to {root}: {error.strerror or error}; {_ELSEWHERE}") from error


def _free(root: Path) -> str:
    try:
        return format_size(shutil.disk_usage(root).free)
    except OSError:
        return "unknown space"


@contextlib.contextmanager
def whole_or_nothing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, and to read back, that becomes `path` once it is whole and synced, and is removed where writing
    fails. The caller has the lock of the folder: the unfinished file always has the same name."""
    temporary = path.with_suffix(PARTIAL)
    try:
        with open(temporary, "w+b") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    file_io.sync_folder(path.parent)  # the name too survives a power failure, before another file speaks of it


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces the content of `path`: a reader sees the old or the new one."""
    with whole_or_nothing(path) as handle:
        handle.write(content)


class Pieces:
    """Appends to a new file, which is written in pieces of `PIECE` bytes at multiples of it, the last one shorter."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._descriptor = handle.fileno()
        self._piece = memoryview(bytearray(PIECE))
        self._end = 0

    def write(self, content: bytes | memoryview) -> int:
        """Appends `content` and returns its bytes. They are in the file once a piece is whole, or after `finish`."""
        rest = memoryview(content)
        while rest:
            filled = self._end % PIECE
            some = rest[: PIECE - filled]
            self._piece[filled : filled + len(some)] = some
            self._end, rest = self._end + len(some), rest[len(some) :]
            if self._end % PIECE == 0:
                file_io.write_at(self._descriptor, self._piece, self._end - PIECE)
        return len(content)

    def finish(self) -> None:
        """Writes the last piece."""
        filled = self._end % PIECE
        file_io.write_at(self._descriptor, self._piece[:filled], self._end - filled)


def forget_cached(handle: IO[bytes]) -> None:
    """Drops a file that was written in small parts from the system's cache, where that is possible, so that the next
    reader's pages are huge (`PIECE`). Waits until the file is on the drive."""
    handle.flush()
    os.fsync(handle.fileno())
    file_io.drop_cached(handle.fileno())


class ExtentWriter:
    """Appends an extent of one matrix to a file. Gaps between fields are zeros."""

    def __init__(self, handle: IO[bytes], layout: Layout) -> None:
        self._descriptor = handle.fileno()
        self.offset = os.fstat(self._descriptor).st_size
        self._end = self.offset + layout.nbytes
        os.ftruncate(self._descriptor, self._end)
        self._places = {placed.field.name: self.offset + placed.offset for placed in layout.fields}

    def write(self, field: Field, first: int, value: torch.Tensor) -> None:
        """Writes the values of `field` for rows of the matrix from `first` on; from any thread."""
        before, after = field.shape[: field.rows_at], field.shape[field.rows_at + 1 :]
        row = torch.Size(after).numel() * field.dtype.itemsize
        runs = value.contiguous().view(torch.Size(before).numel(), -1).view(torch.uint8).numpy()
        for index, run in enumerate(runs):
            at = self._places[field.name] + (index * field.shape[field.rows_at] + first) * row
            file_io.write_at(self._descriptor, run.data, at)

    def checksum(self) -> str:
        """The checksum of the extent, read back from the file."""
        digest = xxhash.xxh3_64()
        start = self.offset
        while start < self._end:
            content = file_io.read_bytes_at(self._descriptor, min(_READ, self._end - start), start)
            digest.update(content)
            start += len(content)
        return str(digest.hexdigest())


def header_of(layout: Layout, layer: int, experts: int) -> bytes:
    """The file's first bytes (length prefix, JSON, spaces), a multiple of 4 KiB long."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt", "tiermoe": "expert-store"}}
    for expert in range(experts):
        begin, gap = expert * layout.nbytes, 0
        end = begin
        for placed in layout.fields:
            start = begin + placed.offset
            if start > end:
                table[f"layers.{layer}.experts.{expert}.padding.{gap}"] = _entry("U8", [start - end], end, start)
                gap += 1
            end = start + placed.field.nbytes
            name = f"layers.{layer}.experts.{expert}.{placed.part}.{placed.field.name}"
            table[name] = _entry(_DTYPE_NAMES[placed.field.dtype], list(placed.field.shape), start, end)
        if begin + layout.nbytes > end:
            stop = begin + layout.nbytes
            table[f"layers.{layer}.experts.{expert}.padding.{gap}"] = _entry("U8", [stop - end], end, stop)
    text = json.dumps(table, separators=(",", ":")).encode()
    length = align(8 + len(text), PAGE) - 8
    return struct.pack("<Q", length) + text.ljust(length, b" ")


def write_header(file: Pieces, layout: Layout, layer: int, experts: int) -> int:
    """Writes the header and returns the offset of expert 0."""
    return file.write(header_of(layout, layer, experts))


def file_name(key: str, layer: int | str) -> str:
    """The file of one layer's experts in precision `key`; a pattern of such names where either is '*'."""
    return f"experts-{key}-layer{layer:0>3}.safetensors" if layer != "*" else f"experts-{key}-layer*.safetensors"


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
