"""Files and memory by the calls that Linux, macOS and Windows each have: reading and writing at an offset from any
thread, past the page cache where the system can, locks, mappings, and names that survive a power failure."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from tiermoe.process import windows


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


fcntl: Any = _module("fcntl")
msvcrt: Any = _module("msvcrt")
"""Python's modules of POSIX and of Windows, None elsewhere."""
_BINARY = getattr(os, "O_BINARY", 0)  # Windows changes line ends without it
_FORGET = {"linux": 4, "darwin": 5}.get(sys.platform)
"""MADV_DONTNEED, and MADV_FREE, which alone does so on macOS; None: there is no such call."""
_LOCKED_AT = 1 << 40  # a byte that no content reaches: what is locked on Windows cannot be read by others


def can_read_directly() -> bool:
    """Whether the system reads files past its page cache (O_DIRECT, F_NOCACHE, FILE_FLAG_NO_BUFFERING)."""
    return hasattr(os, "O_DIRECT") or hasattr(fcntl, "F_NOCACHE") or msvcrt is not None


def open_to_read(file: Path | str, direct: bool = False) -> tuple[int, bool]:
    """A descriptor, and whether it reads past the page cache: where `direct` asks for it, and system and file system
    can. Direct reads take whole pages, into memory that begins at one."""
    if direct and hasattr(os, "O_DIRECT"):
        with _unless_refused():
            return os.open(file, os.O_RDONLY | os.O_DIRECT), True
    elif direct and hasattr(fcntl, "F_NOCACHE"):
        descriptor = os.open(file, os.O_RDONLY)
        with _unless_refused():
            fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
            return descriptor, True
        return descriptor, False
    elif direct and msvcrt is not None:
        handle = windows.open_direct(windows.kernel32(), file)
        return msvcrt.open_osfhandle(handle, os.O_RDONLY | _BINARY), True
    return os.open(file, os.O_RDONLY | _BINARY), False


@contextlib.contextmanager
def _unless_refused() -> Any:
    """Passes over what a file system without direct reading says."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def open_to_write(file: Path | str) -> int:
    """A descriptor to read and write a file, which is made where there is none."""
    return os.open(file, os.O_RDWR | os.O_CREAT | _BINARY, 0o644)


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Bytes read into `view` from `offset` on; 0 at the file's end."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    if hasattr(os, "pread"):
        content = os.pread(descriptor, len(view), offset)
        view[: len(content)] = content
        return len(content)
    return windows.read_at(windows.kernel32(), msvcrt.get_osfhandle(descriptor), view, offset)


def read_scattered(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
    """Bytes read into `views`, one after the other, from `offset` on; fewer than they hold at the file's end."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, views, offset)
    done = 0
    for view in views:
        count = read_at(descriptor, view, offset + done)
        done += count
        if count < len(view):
            break
    return done


def read_bytes_at(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Up to so many bytes from `offset` on."""
    buffer = bytearray(nbytes)
    return bytes(buffer[: read_at(descriptor, memoryview(buffer), offset)])


def write_at(descriptor: int, content: memoryview | bytes, offset: int) -> None:
    """Writes all of `content` at `offset`."""
    done = 0
    while done < len(content):
        rest = content[done:]
        if hasattr(os, "pwrite"):
            done += os.pwrite(descriptor, rest, offset + done)
        else:
            handle = msvcrt.get_osfhandle(descriptor)
            done += windows.write_at(windows.kernel32(), handle, bytes(rest), offset + done)


def lock(descriptor: int) -> None:
    """Locks a file until the descriptor is closed or the process ends. BlockingIOError where another process has it."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    os.lseek(descriptor, _LOCKED_AT, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        raise BlockingIOError(errno.EAGAIN, "locked by another process") from error
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the drive; Windows does that by itself, and opens no folders."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_cached(descriptor: int, offset: int = 0, nbytes: int = 0) -> bool:
    """Has the system forget what it caches of a file, all of it where `nbytes` is 0; False where it takes no such
    word."""
    if not hasattr(os, "posix_fadvise"):
        return False
    os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)
    return True


def anonymous_memory(nbytes: int, huge: bool = True) -> mmap.mmap:
    """Fresh memory at a page's begin, outside malloc: pages come when they are first written. huge: in huge pages where
    the system has them; else never."""
    if hasattr(mmap, "MAP_ANONYMOUS"):
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        if huge:
            memory.madvise(mmap.MADV_HUGEPAGE)
        else:
            with contextlib.suppress(OSError):  # a system without huge pages
                memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def gives_back() -> bool:
    """Whether the system takes parts of `anonymous_memory` back; Windows takes all or nothing."""
    return _FORGET is not None


def give_back(address: int, nbytes: int) -> None:
    """Gives the whole pages of a range of `anonymous_memory` back, where the system takes them: what they hold is lost,
    and they come again when they are written."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if _FORGET is None or begin >= end:
        return
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.madvise(begin, end - begin, _FORGET)  # locked pages stay


def map_file(handle: IO[bytes]) -> mmap.mmap:
    """A whole file, in huge pages where the file system has them; who writes to it gets a copy of the page."""
    if hasattr(mmap, "MAP_PRIVATE"):
        memory = mmap.mmap(handle.fileno(), 0, flags=mmap.MAP_PRIVATE)
    else:
        memory = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
