"""Writing into a store's folder: one process at a time, and what goes wrong there in words."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tiermoe.config import format_size
from tiermoe.errors import PackError
from tiermoe.process import system_files
from tiermoe.store.files import PARTIAL
from tiermoe.store.store import Store

_ELSEWHERE = "choose another folder with --out (or --store)"


@contextlib.contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Holds the lock of a store's folder and clears what an interrupted process left unfinished there. PackError names
    the process that has the lock, and says what to do where the folder cannot be written or the disk fills."""
    with _in_words(root):
        root.mkdir(parents=True, exist_ok=True)
        descriptor = system_files.open_to_write(root / ".lock")
        try:
            _take(descriptor, root)
            for name in ("store", "packing-*", "experts-*", "dense-*"):
                for unfinished in root.glob(name + PARTIAL):
                    unfinished.unlink()
            yield
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def adding_to(store: Store) -> Iterator[None]:
    """`exclusive`, with the store's table as it is on disk now: another process may have packed meanwhile."""
    with exclusive(store.root):
        store.refresh()
        yield


def _take(descriptor: int, root: Path) -> None:
    try:
        system_files.lock(descriptor)
    except BlockingIOError:
        holder = system_files.read_bytes_at(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        raise PackError(
            f"process {holder} is packing into {root} right now; wait until it is done and run again, or name "
            f"another folder with --out"
        ) from None
    os.ftruncate(descriptor, 0)
    system_files.write_at(descriptor, str(os.getpid()).encode(), 0)


@contextlib.contextmanager
def _in_words(root: Path) -> Iterator[None]:
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
