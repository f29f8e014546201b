"""Calls of Windows' kernel32: memory, and files read and written at an offset. Their parameter `library` is what
`kernel32` returns, or a fake of it."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

_GENERIC_READ = 0x80000000
_SHARED = 7  # with readers, writers, and who removes it
_OPEN_EXISTING = 3
_NO_BUFFERING = 0x20000000
_HANDLE_EOF = 38
_INVALID_HANDLE = ctypes.c_void_p(-1).value


class MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *[
            (name, ctypes.c_uint64)
            for name in (
                "total", "available", "page_file", "page_file_left", "virtual", "virtual_left", "extended_left",
            )
        ],
    )  # fmt: skip


class ProcessMemory(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("faults", ctypes.c_uint32),
        *[
            (name, ctypes.c_size_t)
            for name in (
                "peak", "resident", "peak_paged_pool", "paged_pool", "peak_pool", "pool", "page_file", "peak_page_file",
            )
        ],
    )  # fmt: skip


class Overlapped(ctypes.Structure):
    """OVERLAPPED: the offset in a file at which a call reads or writes."""

    _fields_ = (
        ("internal", ctypes.c_void_p),
        ("internal_high", ctypes.c_void_p),
        ("offset", ctypes.c_uint32),
        ("offset_high", ctypes.c_uint32),
        ("event", ctypes.c_void_p),
    )


@lru_cache(maxsize=1)
def kernel32() -> Any:
    """The library. KeyError elsewhere than on Windows."""
    library = vars(ctypes)["WinDLL"]("kernel32", use_last_error=True)
    library.CreateFileW.restype = ctypes.c_void_p
    library.GetCurrentProcess.restype = ctypes.c_void_p
    return library


def memory(library: Any) -> tuple[int, int]:
    """(bytes that are available, bytes in all) of main memory (GlobalMemoryStatusEx)."""
    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    if not library.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise last_error("asking for free memory")
    return status.available, status.total


def process_memory(library: Any) -> tuple[int, int]:
    """(resident bytes, their peak) of this process (K32GetProcessMemoryInfo)."""
    counters = ProcessMemory(length=ctypes.sizeof(ProcessMemory))
    process = ctypes.c_void_p(library.GetCurrentProcess())
    if not library.K32GetProcessMemoryInfo(process, ctypes.byref(counters), counters.length):
        raise last_error("asking for the process's memory")
    return counters.resident, counters.peak


def open_direct(library: Any, file: Path | str) -> int:
    """A handle that reads past the system's cache, whole pages into aligned memory (FILE_FLAG_NO_BUFFERING)."""
    handle = library.CreateFileW(str(file), _GENERIC_READ, _SHARED, None, _OPEN_EXISTING, _NO_BUFFERING, None)
    if handle in (None, _INVALID_HANDLE):
        raise last_error(f"opening {file}")
    return int(handle)


def read_at(library: Any, handle: int, view: memoryview, offset: int) -> int:
    """Bytes read into `view` from `offset` on (ReadFile); 0 at the file's end. Several threads may read one handle."""
    done, buffer = ctypes.c_uint32(), (ctypes.c_char * len(view)).from_buffer(view)
    place = Overlapped(offset=offset & 0xFFFFFFFF, offset_high=offset >> 32)
    arguments = (ctypes.c_void_p(handle), buffer, len(view), ctypes.byref(done), ctypes.byref(place))
    if not library.ReadFile(*arguments) and _error_number() != _HANDLE_EOF:
        raise last_error("reading")
    return done.value


def write_at(library: Any, handle: int, content: bytes, offset: int) -> int:
    """Bytes of `content` written at `offset` (WriteFile)."""
    done = ctypes.c_uint32()
    place = Overlapped(offset=offset & 0xFFFFFFFF, offset_high=offset >> 32)
    arguments = (ctypes.c_void_p(handle), content, len(content), ctypes.byref(done), ctypes.byref(place))
    if not library.WriteFile(*arguments):
        raise last_error("writing")
    return done.value


def last_error(what: str) -> OSError:
    """The error of the last call, with `what` was tried."""
    number = _error_number()
    describe = vars(ctypes).get("FormatError", lambda number: f"error {number}")
    return OSError(None, f"{what}: {describe(number)}", None, number)


def _error_number() -> int:
    return int(vars(ctypes).get("get_last_error", lambda: 0)())
