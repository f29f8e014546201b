"""Slots that are the store's own files, mapped: what is loaded is neither copied nor given memory of its own.

For a store whose experts are all wanted and fit, with everything else, into the page cache. A load brings an extent's
pages in and compares its checksum, as a load into memory of one's own does, and the same threads do it.

* Pages count as the process's resident memory, and as page cache in control groups. The plan counts them as slots.
* The system may drop pages when other programs need memory. They are read again when a kernel comes to them: slower,
  and the same bytes, unless the drive has damaged them since, which nobody checks. Where the drive cannot read them the
  process ends (SIGBUS). So slots hold copies wherever memory may become scarce.
* A mapped file may be removed or replaced: the mapping keeps what it was. It must not be truncated or written to.
  Packing never does either: it writes beside and renames, and removes by unlinking. A checkpoint's files are other
  programs' to change, and are never mapped. A file that was cut short between two steps is an error (`check`); one that
  is cut while a step computes from it, or less than `CHECK_EVERY_S` before, ends the process yet (SIGBUS).
* Nothing writes into a slot after a load. Whoever did would get a copy of that page: the file stays as it is.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch

from tiermoe.errors import LoadError
from tiermoe.offload.reader import ExtentReader, aligned_memory, verify
from tiermoe.platform.file_io import map_file
from tiermoe.types import ExpertKey, Extent, Segment

_MADV_POPULATE_READ = 22  # Linux 5.14
_AT_ONCE = 16 << 20  # bytes that reading ahead asks for at once
CHECK_EVERY_S = 0.01
"""Sizes of nine files are asked in 5 µs; a step of a small model takes 260."""
_ELSEWHERE = 1 << 20  # bytes read at once into memory that nobody uses


class MappedFiles:
    """Files that are mapped whole, each when it is first asked for, in huge pages if the file system has them."""

    def __init__(self) -> None:
        self._files: dict[str, torch.Tensor] = {}
        self._mappings: dict[str, mmap.mmap] = {}
        self._check_at = 0.0
        self._closed = threading.Event()
        self._ahead: threading.Thread | None = None

    def add(self, files: Iterable[str]) -> None:
        """Maps files. OSError if the system cannot."""
        for file in files:
            with open(file, "rb") as handle:
                memory = map_file(handle)
            self._mappings[file] = memory
            self._files[file] = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))

    def view(self, extent: Extent) -> torch.Tensor:
        """The bytes of an extent of one segment, uint8 (nbytes,), as they lie in the file. LoadError if the file was
        shorter when it was mapped."""
        (segment,) = extent.segments
        whole = self._files[segment.file]
        if segment.offset + segment.nbytes > len(whole):
            raise LoadError(f"{segment.file} is truncated: 'tiermoe pack MODEL --force' packs anew")
        return whole[segment.offset : segment.offset + segment.nbytes]

    def check(self) -> None:
        """LoadError if a file is shorter by now than what is mapped of it, before somebody comes to pages that are
        not there. Looks every `CHECK_EVERY_S` seconds at the most."""
        now = time.monotonic()
        if now < self._check_at:
            return
        for file, mapping in self._mappings.items():
            missing = len(mapping) - mapping.size()
            if missing > 0:
                raise LoadError(
                    f"{file} has become {missing:,} bytes shorter while it was in use; "
                    f"'tiermoe pack MODEL --force' packs anew"
                )
        self._check_at = now + CHECK_EVERY_S

    def read_ahead(self) -> None:
        """Begins to bring all files into memory, in the order in which they were mapped. Returns at once; what cannot
        be read is left to whoever needs it."""
        self._ahead = threading.Thread(target=self._bring_all, name="tiermoe-read-ahead", daemon=True)
        self._ahead.start()

    def close(self) -> None:
        """Ends reading ahead. Files are unmapped once no view of them is left."""
        self._closed.set()
        if self._ahead is not None:
            self._ahead.join()
        self._files.clear()
        self._mappings.clear()

    def _bring_all(self) -> None:
        for whole in list(self._files.values()):
            for begin in range(0, len(whole), _AT_ONCE):
                if self._closed.is_set() or not populate(whole[begin : begin + _AT_ONCE]):
                    return


def populate(pages: torch.Tensor) -> bool:
    """Brings mapped pages (uint8, from a page's begin) into memory, without the interpreter's lock. False if the
    system does not know how, or cannot read one."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(libc.madvise(pages.data_ptr(), len(pages), _MADV_POPULATE_READ) == 0)


class MappedReader:
    """Reads extents that are mapped, from any number of threads at once (`offload.disk.Reader`)."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._reader = ExtentReader(keep=True)
        self._lock = threading.Lock()

    def read(self, extent: Extent, target: memoryview, key: ExpertKey) -> None:
        """Brings in `target`, where the extent is mapped, and verifies it. LoadError as `ExtentReader.read`."""
        if not populate(torch.frombuffer(target, dtype=torch.uint8)):
            self._read_elsewhere(extent.segments[0], key)
        verify(extent, target, key)
        with self._lock:
            self.bytes_read += extent.nbytes

    def close(self) -> None:
        self._reader.close()

    def _read_elsewhere(self, segment: Segment, key: ExpertKey) -> None:
        """Reads what could not be brought in, to no use: that brings the pages too, or tells what is wrong with them,
        if touching a page of the mapping would end the process."""
        memory = aligned_memory(_ELSEWHERE)
        for begin in range(0, segment.nbytes, _ELSEWHERE):
            nbytes = min(_ELSEWHERE, segment.nbytes - begin)
            self._reader.read_part(Segment(segment.file, segment.offset + begin, nbytes, 0), memory, key)


class MappedSlots:
    """`count` slots, each of which is the extent of the expert that was placed in it last
    (`offload.slots.FilledSlots`)."""

    def __init__(self, count: int, files: MappedFiles, extent_of: Callable[[ExpertKey], Extent]) -> None:
        self._files = files
        self._extent_of = extent_of
        self._placed: list[torch.Tensor | None] = [None] * count
        self._in_use = [False] * count

    def place(self, slot: int, key: ExpertKey) -> torch.Tensor:
        """Where the expert is mapped, uint8; `buffer` of the slot from now on. RuntimeError if another one was used
        there: its views would still be taken for the slot's."""
        if self._in_use[slot]:
            raise RuntimeError(f"{key} was given a mapped slot that another expert is used from")
        self._placed[slot] = view = self._files.view(self._extent_of(key))
        return view

    def address(self, slot: int, key: ExpertKey) -> int:
        return self.place(slot, key).data_ptr()

    def buffer(self, slot: int) -> torch.Tensor:
        """The extent of the expert in slot `slot`, uint8."""
        placed = self._placed[slot]
        assert placed is not None
        self._in_use[slot] = True
        return placed

    def close(self) -> None:
        """Unmaps the files once no view of a slot is left."""
        self._placed.clear()
        self._files.close()
