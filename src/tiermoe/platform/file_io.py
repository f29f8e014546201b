"""Files by the calls that Linux and macOS each have: reads and writes at an offset from any thread, direct I/O
where the system has it, locks, mappings, and names that survive a power failure."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

_NOCACHE: int | None = getattr(fcntl, "F_NOCACHE", None)
"""macOS's command of direct I/O; None: the system has none."""
_AHEAD = 1 << 20  # bytes that Linux reads ahead at a call; it drops what is beyond a drive's largest request


def can_read_directly() -> bool:
    """Whether the system reads files past its page cache (O_DIRECT, F_NOCACHE)."""
    return hasattr(os, "O_DIRECT") or _NOCACHE is not None


def open_to_read(file: Path | str, direct: bool = False) -> tuple[int, bool]:
    """(descriptor, whether it reads past the page cache). direct: asks for direct I/O, which the file system may not
    have. Direct reads take whole pages, into memory that begins at one."""
    if direct and hasattr(os, "O_DIRECT"):
        with _unless_refused():
            return os.open(file, os.O_RDONLY | os.O_DIRECT), True
    elif direct and _NOCACHE is not None:
        descriptor = os.open(file, os.O_RDONLY)
        with _unless_refused():
            fcntl.fcntl(descriptor, _NOCACHE, 1)
            return descriptor, True
        return descriptor, False
    return os.open(file, os.O_RDONLY), False


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
    return os.open(file, os.O_RDWR | os.O_CREAT, 0o644)


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Number of bytes read into `view` from `offset` on; 0 at the file's end."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    content = os.pread(descriptor, len(view), offset)
    view[: len(content)] = content
    return len(content)


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
        done += os.pwrite(descriptor, content[done:], offset + done)


def lock(descriptor: int) -> None:
    """Locks a file until the descriptor is closed or the process ends. BlockingIOError if another process has the
    lock."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def lock_folder(folder: Path, shared: bool) -> int | None:
    """A descriptor that locks a folder until it is closed or the process ends, alone, or beside others that share it.
    BlockingIOError if another process has a lock that this one cannot share. None if folders cannot be locked: some
    network file systems, which keep a file that is removed until it is closed."""
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
    """Waits until a folder's names are on the drive."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_cached(descriptor: int, offset: int = 0, nbytes: int = 0) -> bool:
    """Drops a range of a file from the page cache, the whole file where `nbytes` is 0. False if the system has no
    call for it."""
    if not hasattr(os, "posix_fadvise"):
        return False
    os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)
    return True


def read_ahead(descriptor: int, offset: int, nbytes: int) -> bool:
    """Asks the system to read a range of a file into the page cache, and waits for no drive. False if the system has
    no call for it."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for begin in range(0, nbytes, _AHEAD):
        os.posix_fadvise(descriptor, offset + begin, min(_AHEAD, nbytes - begin), os.POSIX_FADV_WILLNEED)
    return True


def map_file(handle: IO[bytes]) -> mmap.mmap:
    """A whole file mapped copy-on-write, in huge pages where the file system has them."""
    memory = mmap.mmap(handle.fileno(), 0, flags=mmap.MAP_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
