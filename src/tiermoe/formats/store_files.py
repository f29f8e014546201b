"""Folders of stores, without torch: the user's cache folder and the stores in it, found, named, and removed if nobody
uses them; files that one process at a time writes into a store's folder, each whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tiermoe.config import format_size
from tiermoe.errors import ConfigError, PackError, StoreError
from tiermoe.platform import file_io
from tiermoe.platform.json_files import read_json

FORMAT = "tiermoe-expert-store"
TABLE = "store.json"
LOCK = ".lock"
"""File that a process locks while it packs into the folder."""
_EXPERTS = "experts-*"  # all that an interrupted removal may have left
PARTIAL = ".partial"

PIECE = 2 << 20
"""Bytes of a huge page. Linux caches what is written so many at a time, at multiples of it, in huge pages, and what is
written in smaller pieces in small ones, until it is read from the drive again: kernels over a store's mapped files are
up to a fifth slower then (notebook/2026-11-21-warm-start.md)."""

_ELSEWHERE = "choose another folder with --store"
_POLL_S = 0.2
_PROGRESS = re.compile(rb"(\d{1,10}) (\d{1,10}) (\d{1,10})\n")  # process, done, in all
_PROGRESS_BYTES = 64

Progress = Callable[[int, int], None]
"""Called with (done, in all)."""

Waiting = Callable[[str, int, int], None]
"""Called with (the process that is waited for, what it has done, in all)."""


@dataclass(frozen=True, slots=True)
class CachedStore:
    """A store in the user's cache folder."""

    root: Path
    name: str  # of the model, as the user named it; of the folder where the table cannot be read
    precisions: tuple[str, ...]  # of experts, by their keys; none where they run where the checkpoint has them
    dense: tuple[str, ...]  # of packed dense layers, by their keys
    nbytes: int  # of all files
    used: float  # when it was last packed into or run from; seconds since the epoch
    profiles: int  # number of calibration profiles
    problem: str  # why its table cannot be read; empty for a whole store

    @property
    def label(self) -> str:
        """The model's name in the folder's name, which also has the checkpoint's fingerprint."""
        return self.root.name.rpartition("-")[0]

    def answers_to(self, name: str) -> bool:
        """Whether a user's name stands for this store: the model's, or that of the folder without the fingerprint."""
        return name == self.name or name.replace("/", "--") == self.label


def cache_folder() -> Path:
    """The user's cache folder: TIERMOE_CACHE, or XDG_CACHE_HOME/tiermoe, or ~/.cache/tiermoe. Empty variables count as
    none. ConfigError where nothing names a folder of the user's."""
    if own := os.environ.get("TIERMOE_CACHE"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "tiermoe"
    try:
        home = None if os.environ.get("HOME") == "" else Path.home()  # Python takes / for an empty one
    except RuntimeError:
        home = None
    if home is None:
        raise ConfigError(
            "there is no folder for packed experts: HOME and XDG_CACHE_HOME are empty; set one of them, or "
            "TIERMOE_CACHE"
        )
    return home / ".cache" / "tiermoe"


def cached_stores() -> list[CachedStore]:
    """The stores in the user's cache folder, the one that was used last first; those too that are damaged."""
    try:
        folders = [each for each in cache_folder().absolute().iterdir() if each.is_dir()]
    except OSError:
        return []
    stores = [_described(each) for each in folders if (each / TABLE).exists() or next(each.glob(_EXPERTS), None)]
    return sorted(stores, key=lambda store: -store.used)


def _described(root: Path) -> CachedStore:
    name, precisions, dense, problem = root.name, (), (), ""
    try:
        table: Any = read_json(root / TABLE)
        if table["format"] != FORMAT:
            raise ValueError("it is another program's")
        name, precisions, dense = str(table["source"]["name"]), tuple(table["precisions"]), tuple(table["dense"])
    except FileNotFoundError:
        problem = "its removal, or its packing, was interrupted"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"its table cannot be read ({error})"
    files = [(each, each.lstat()) for each in root.rglob("*") if not each.is_dir()]
    used = max(
        (about.st_mtime for each, about in files if each.parent == root and each.name != LOCK),
        default=root.stat().st_mtime,
    )
    profiles = sum(1 for _ in (root / "profiles").glob("*"))
    return CachedStore(
        root, name, precisions, dense, sum(about.st_size for _, about in files), used, profiles, problem
    )  # fmt: skip


def hold(root: Path) -> int | None:
    """Keeps a store from being removed until the descriptor is closed, or the process ends. None where the system locks
    no folders. StoreError while it is being removed."""
    try:
        return file_io.lock_folder(root, shared=True)
    except BlockingIOError as error:
        raise StoreError(f"the store in {root} is being removed by another process; run this again") from error


def removable(store: CachedStore) -> bool:
    """Whether a store is no link, and no process packs into it or runs from it now."""
    try:
        with _alone(store.root):
            return not store.root.is_symlink()
    except (StoreError, OSError):
        return False


def remove_store(store: CachedStore) -> None:
    """Removes a store's folder. StoreError where it is a link or cannot be removed, or where a process packs into it or
    runs from it."""
    root = store.root
    if root.is_symlink():
        raise StoreError(f"{root} is a link to a folder elsewhere, of which nothing is removed; remove it by hand")
    try:
        with _alone(root):
            (root / TABLE).unlink(missing_ok=True)  # first: nobody takes what is left for a store
            for entry in root.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name != LOCK:
                    entry.unlink()
        shutil.rmtree(root)
    except OSError as error:
        raise StoreError(f"{root} cannot be removed: {error.strerror}; check its permissions") from error


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """While no other process packs into a store or has it open."""
    packing = file_io.open_to_write(root / LOCK)
    opened = None
    try:
        try:
            file_io.lock(packing)
        except BlockingIOError as error:
            raise StoreError(f"a process packs into {root}; end it, or wait until it is done") from error
        try:
            opened = file_io.lock_folder(root, shared=False)
        except BlockingIOError as error:
            raise StoreError(f"a running process uses the store in {root}; end it first") from error
        yield
    finally:
        os.close(packing)
        if opened is not None:
            os.close(opened)


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


def file_name(key: str, layer: int | str) -> str:
    """The file of one layer's experts in precision `key`; a pattern of such names where either is '*'."""
    return f"experts-{key}-layer{layer:0>3}.safetensors" if layer != "*" else f"experts-{key}-layer*.safetensors"
