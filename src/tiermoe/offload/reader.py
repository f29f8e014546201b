"""Reads the extents of experts: O_DIRECT into page-aligned memory if it can, checked against their checksums; or
once into main memory, from where they are copied afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence

import torch
import xxhash

from tiermoe.errors import LoadError
from tiermoe.formats.expert_format import PAGE, align
from tiermoe.native import _native, available
from tiermoe.platform import file_io, process_memory
from tiermoe.types import ExpertKey, Extent, Segment


def aligned_memory(nbytes: int) -> memoryview:
    """Fresh page-aligned memory, in huge pages if it is large enough for one."""
    return memoryview(process_memory.anonymous_memory(align(max(nbytes, 1), PAGE)))


class ExtentReader:
    """Reads extents, from any number of threads at once. `direct` asks for O_DIRECT, which bypasses the page cache so
    that no second copy of the experts grows there; a file system without it is read through the page cache and the
    pages dropped at once. `keep` reads through the page cache and leaves the pages there, for the next process. Parts
    of extents are read in whole pages of `page` bytes, and are not `checked`."""

    page = PAGE
    checked = False

    def __init__(self, direct: bool = True, keep: bool = False) -> None:
        self.direct = direct and not keep and file_io.can_read_directly()
        self.keep = keep
        self.bytes_read = 0
        self._descriptors: dict[str, tuple[int, bool]] = {}
        self._lock = threading.Lock()
        self._bounce = threading.local()

    def read(self, extent: Extent, target: memoryview, key: ExpertKey) -> None:
        """Fills `target` (page-aligned, writable) with the extent's bytes. LoadError names the expert, the file and the
        cause: an I/O error, a file that ends early, or a checksum that does not match."""
        for segment in extent.segments:
            self.read_part(segment, target, key)
        verify(extent, target, key)

    def read_part(self, part: Segment, target: memoryview, key: ExpertKey) -> None:
        """Fills its place in `target` with one part of an expert, whose bytes are the caller's to check. LoadError
        names the expert, the file and the cause: an I/O error, or a file that ends early."""
        try:
            self._read_segment(part, target)
        except OSError as error:
            raise unreadable(key, part, error.strerror or str(error)) from error
        with self._lock:
            self.bytes_read += part.nbytes

    def close(self) -> None:
        with self._lock:
            for descriptor, _ in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def _read_segment(self, segment: Segment, target: memoryview) -> None:
        descriptor, direct = self.open(segment.file)
        view = target[segment.at : segment.at + segment.nbytes]
        if not direct:
            _read_fully(descriptor, [view], segment.offset, segment.nbytes)
            if not self.keep:
                file_io.drop_cached(descriptor, segment.offset, segment.nbytes)
        elif (segment.offset - segment.at) % PAGE == 0 and segment.nbytes >= 2 * PAGE:
            self._read_pages(descriptor, segment.offset, view)
        else:
            start = segment.offset // PAGE * PAGE
            skip = segment.offset - start
            bounce = self._bounce_buffer(skip + segment.nbytes)
            _read_fully(descriptor, [bounce], start, skip + segment.nbytes)
            view[:] = bounce[skip : skip + segment.nbytes]

    def _read_pages(self, descriptor: int, offset: int, view: memoryview) -> None:
        """Fills memory that lies in its pages as the bytes at `offset` do in the file's: in one read. Only what shares
        its first and its last page with others is copied."""
        before, head = offset % PAGE, -offset % PAGE
        tail = (len(view) - head) % PAGE
        edges = self._bounce_buffer(2 * PAGE)
        views = [edges[:PAGE], view[head : len(view) - tail], edges[PAGE : 2 * PAGE]]
        _read_fully(descriptor, views[0 if head else 1 : 3 if tail else 2], offset - before, before + len(view))
        if head:
            view[:head] = edges[before:PAGE]
        if tail:
            view[len(view) - tail :] = edges[PAGE : PAGE + tail]

    def _bounce_buffer(self, nbytes: int) -> memoryview:
        buffer: memoryview | None = getattr(self._bounce, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._bounce.buffer = aligned_memory(nbytes)
        return buffer[: align(nbytes, PAGE)]

    def open(self, file: str) -> tuple[int, bool]:
        """A file's descriptor, until `close`, and whether it reads past the page cache. OSError if there is none."""
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = file_io.open_to_read(file, self.direct)
            return self._descriptors[file]


def verify(extent: Extent, content: memoryview, key: ExpertKey) -> None:
    """LoadError if the bytes in `content`, at their places in the extent, do not match its checksum. An extent
    without one (of a file that nobody has read whole) matches."""
    if not extent.checksum:
        return
    digest = xxhash.xxh3_64()
    for segment in extent.segments:
        digest.update(content[segment.at : segment.at + segment.nbytes])
    if digest.hexdigest() != extent.checksum:
        raise damaged(str(key), extent.segments[0].file)


def unreadable(key: ExpertKey, part: Segment, why: str) -> LoadError:
    """The error for a part of an expert that cannot be read."""
    return LoadError(f"reading {key} failed at byte {part.offset:,} of {part.file}: {why}")


def damaged(what: str, file: str) -> LoadError:
    """The error for `what` in `file` whose checksum does not match."""
    return LoadError(
        f"{what} is damaged: its bytes in {file} do not match their checksum; "
        f"'tiermoe show STORE --verify' lists all damage, 'tiermoe pack MODEL --force' packs anew"
    )


def _read_fully(descriptor: int, views: Sequence[memoryview], offset: int, wanted: int) -> None:
    """Reads into `views`, one after the other, until at least `wanted` bytes are there (a direct read may ask for the
    rest of a page too)."""
    done = 0
    while done < wanted:
        count = file_io.read_scattered(descriptor, _after(views, done), offset + done)
        if count == 0:
            raise OSError(f"the file ends {wanted - done:,} bytes early")
        done += count


def _after(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of `views` after so many bytes of them."""
    left = []
    for view in views:
        if done < len(view):
            left.append(view[done:])
        done = max(done - len(view), 0)
    return left


def copy_rows(source: torch.Tensor, target: torch.Tensor, rows: torch.Tensor) -> None:
    """target[rows] = source[rows], both uint8 (N, bytes) and contiguous; rows int64 (n,)."""
    if available():
        _native.gather(source.data_ptr(), target.data_ptr(), source.shape[1], rows.data_ptr(), len(rows))
    else:
        target[rows] = source[rows]


class HeldReader:
    """Serves `experts` as `ExtentReader` does, from any number of threads at once. Parts are served of experts that lie
    in one piece. `bytes_read`: bytes copied since. LoadError if an expert cannot be read."""

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

    def gather(self, part: Segment, target: memoryview, key: ExpertKey, rows: torch.Tensor, row_bytes: int) -> None:
        """Fills the rows (int64 (n,)) of their place in `target` with those of a part."""
        first, memory = self._held[key]
        at = part.offset - first
        source = torch.frombuffer(memory, dtype=torch.uint8)[at : at + part.nbytes].view(-1, row_bytes)
        placed = torch.frombuffer(target, dtype=torch.uint8)[part.at : part.at + part.nbytes].view(-1, row_bytes)
        copy_rows(source, placed, rows)
        self._count(len(rows) * row_bytes)

    def close(self) -> None:
        self._held.clear()

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes
