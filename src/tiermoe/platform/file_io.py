"""Files by the calls that Linux, macOS and Windows each have: reads and writes at an offset from any thread, direct I/O
where the system has it, locks, mappings, and names that survive a power failure."""

from __future__ import annotations

import contextlib
import errno
import importlib
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from tiermoe.platform import windows


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


fcntl: Any = _module("fcntl")
msvcrt: Any = _module("msvcrt")
"""Python's modules of POSIX and of Windows, None elsewhere."""
_BINARY = getattr(os, "O_BINARY", 0)  # Windows changes line ends without it
_AHEAD = 1 << 20  # bytes that Linux reads ahead at a call; it drops what is beyond a drive's largest request
_LOCKED_AT = 1 << 40  # a byte past all content: other processes cannot read a byte that is locked on Windows


def can_read_directly() -> bool:
    """Whether the system reads files past its page cache (O_DIRECT, F_NOCACHE, FILE_FLAG_NO_BUFFERING)."""
    return hasattr(os, "O_DIRECT") or hasattr(fcntl, "F_NOCACHE") or msvcrt is not None


def open_to_read(file: Path | str, direct: bool = False) -> tuple[int, bool]:
    """(descriptor, whether it reads past the page cache). direct: asks for direct I/O, which the file system may not
    have. Direct reads take whole pages, into memory that begins at one."""
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
def _unless_refused() -> Iterator[None]:
    """Passes over the error of a file system without direct I/O."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def open_to_write(file: Path | str) -> int:
    """A descriptor to read and write a file, which is created where it is missing."""
    return os.open(file, os.O_RDWR | os.O_CREAT | _BINARY, 0o644)


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Number of bytes read into `view` from `offset` on; 0 at the file's end."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    if hasattr(os, "pread"):
        content = os.pread(descriptor, len(view), offset)
        view[: len(content)] = content
        return len(content)
    return windows.read_at(windows.kernel32(), msvcrt.get_osfhandle(descriptor), view, offset)


def read_scattered(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
    """Number of bytes read into `views`, one view after the other, from `offset` on; fewer than they hold at the file's
    end."""
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
    """Up to `nbytes` bytes from `offset` on."""
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
    """Locks a file until the descriptor is closed or the process ends. BlockingIOError where another process has the
    lock."""
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


def lock_folder(folder: Path, shared: bool) -> int | None:
    """A descriptor that locks a folder until it is closed or the process ends, alone, or beside others that share it.
    BlockingIOError where another process has a lock that this one cannot share. None where folders cannot be locked:
    Windows removes no file that is open, and network file systems keep one that is removed until it is closed."""
    if fcntl is None:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


def sync_folder(folder: Path) -> None:
    """Waits until a folder's names are on the drive. Windows does that by itself, and opens no folders."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_cached(descriptor: int, offset: int = 0, nbytes: int = 0) -> bool:
    """Drops a range of a file from the page cache, the whole file where `nbytes` is 0. False where the system has no
    call for it."""
    if not hasattr(os, "posix_fadvise"):
        return False
    os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)
    return True


def read_ahead(descriptor: int, offset: int, nbytes: int) -> bool:
    """Asks the system to read a range of a file into the page cache, and waits for no drive. False where the system has
    no call for it."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for begin in range(0, nbytes, _AHEAD):
        os.posix_fadvise(descriptor, offset + begin, min(_AHEAD, nbytes - begin), os.POSIX_FADV_WILLNEED)
    return True


def map_file(handle: IO[bytes]) -> mmap.mmap:
    """A whole file mapped copy-on-write, in huge pages where the file system has them."""
    if hasattr(mmap, "MAP_PRIVATE"):
        memory = mmap.mmap(handle.fileno(), 0, flags=mmap.MAP_PRIVATE)
    else:
        memory = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
