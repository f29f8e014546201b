"""Writing into a store's folder: one process at a time, others wait; and what goes wrong there in words."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tiermoe.config import format_size
from tiermoe.errors import PackError
from tiermoe.process import system_files
from tiermoe.store.files import PARTIAL
from tiermoe.store.store import Store

Progress = Callable[[int, int], None]
"""Called with (done, in all)."""
Waiting = Callable[[str, int, int], None]
"""Called with (whom a process waits for, what that one has done, in all)."""

_ELSEWHERE = "choose another folder with --store"
_POLL_S = 0.2
_NOTE = re.compile(rb"(\d{1,10}) (\d{1,10}) (\d{1,10})\n")  # process, done, in all
_NOTE_BYTES = 64


@contextlib.contextmanager
def exclusive(root: Path, waiting: Waiting | None = None) -> Iterator[Progress]:
    """Holds the lock of a store's folder and clears what an interrupted process left unfinished there. Yields a call
    that notes progress in the lock's file. Another process that has the lock is waited for; `waiting` is called with
    its progress meanwhile. PackError says what to do where the folder cannot be written or the disk fills."""
    with _in_words(root):
        root.mkdir(parents=True, exist_ok=True)
        descriptor = system_files.open_to_write(root / ".lock")
        try:
            _take(descriptor, waiting or (lambda whom, done, total: None))
            note = functools.partial(_note, descriptor)
            note(0, 1)
            for name in ("store", "packing-*", "experts-*", "dense-*"):
                for unfinished in root.glob(name + PARTIAL):
                    unfinished.unlink()
            yield note
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def adding_to(store: Store, waiting: Waiting | None = None, progress: Progress | None = None) -> Iterator[Progress]:
    """`exclusive`, with the store's table as it is on disk now: another process may have packed meanwhile. What it
    yields notes progress, and calls `progress`."""
    with exclusive(store.root, waiting) as note:
        store.refresh()

        def report(done: int, total: int) -> None:
            note(done, total)
            if progress is not None:
                progress(done, total)

        yield report


def _take(descriptor: int, waiting: Waiting) -> None:
    whom, total = "", 1
    while True:
        try:
            system_files.lock(descriptor)
        except BlockingIOError:
            noted = _NOTE.match(system_files.read_bytes_at(descriptor, _NOTE_BYTES, 0))
            if noted:  # else the process that has the lock is about to write it
                process, done, total = (int(number) for number in noted.groups())
                whom = f"waiting for process {process}, which packs into the same folder"
                waiting(whom, done, total)
            time.sleep(_POLL_S)
        else:
            break
    if whom:
        waiting(whom, total, total)


def _note(descriptor: int, done: int, total: int) -> None:
    """Tells who waits for the lock of the process that has it, and how far that one is."""
    system_files.write_at(descriptor, f"{os.getpid()} {done} {total}\n".ljust(_NOTE_BYTES).encode(), 0)


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
