"""Beginnings of conversations on disk: written in the background from the slabs that hold them, read back into free
ones."""

from __future__ import annotations

import contextlib
import errno
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiermoe.config import MIB, Settings
from tiermoe.engine.load import resolve_for
from tiermoe.engine.numerics import numerics
from tiermoe.memory.activations import sizes_for
from tiermoe.memory.plan import context_of
from tiermoe.model.blueprint import Blueprint
from tiermoe.model.kv_cache import KVCache
from tiermoe.serve.prefix_files import (
    BLOCK,
    END,
    HEAD_BYTES,
    KEPT,
    DamagedError,
    Memory,
    PrefixFolder,
    check_size,
    first_name,
    name_of,
    names_of,
    read,
    write,
)
from tiermoe.tiers.cuda import resolve_device

TURN_BYTES = 32 * MIB
"""What is read of a beginning before the answers under way have a turn."""


@dataclass(slots=True)
class Stored:
    """A beginning that lies on disk. names: of its blocks. length: its tokens, once it has been read those that could
    be. at: blocks that have been read."""

    names: list[bytes]
    length: int
    at: int = 0

    def anew(self) -> Stored:
        """The same, of which nothing has been read."""
        return Stored(self.names[: -(-self.length // BLOCK)], self.length)


@dataclass(slots=True)
class DiskCounts:
    """What has been done since the beginning. dropped: files that were damaged."""

    hits: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    dropped: int = 0


@dataclass(slots=True)
class _Job:
    """tokens: of a slab, to be written. ends: where beginnings of them end that are asked for again. limit: so many
    positions stay as they are. goes_on: nothing changes what layers with a window or a state hold but steps that go on
    behind the tokens."""

    slab: int
    tokens: list[int]
    ends: list[int]
    limit: int
    goes_on: bool


class PrefixDisk:
    """Keeps what lies in the slabs of `cache` in a folder. first: what names begin with (`first_name`). warn: told of
    what went wrong, a line each.

    Nothing waits for it: a slab that is needed is withdrawn, and what has not been written of it by then is not. A
    thread of its own writes one file at a time, from where the values lie."""

    def __init__(self, cache: KVCache, folder: PrefixFolder, first: bytes, warn: Callable[[str], None]) -> None:
        self.counts = DiskCounts()
        self.folder = folder
        self._cache = cache
        self._first_name = first
        self._warn = warn
        self._waiting: dict[int, _Job] = {}  # by slab
        self._current: _Job | None = None
        self._writes = True
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tiermoe-prefixes", daemon=True)
        self._thread.start()

    def find(self, ids: list[int]) -> Stored | None:
        """The longest beginning of `ids` that is there whole."""
        names = [self._first_name]
        for first in range(0, len(ids) - BLOCK + 1, BLOCK):
            name = name_of(names[-1], ids[first : first + BLOCK])
            if not self.folder.has(name, KEPT):
                break
            names.append(name)
        ends = self.folder.names(END) if self._cache.has_ends else None
        for count in range(len(names), 0, -1):
            first = (count - 1) * BLOCK
            found = self._longest(names[count - 1], ids[first : first + BLOCK], ends)
            if found is not None:
                return Stored([*names[1:count], found[0]], first + found[1])
        return None

    def fill(self, stored: Stored, slab: int) -> bool:
        """Reads some of a beginning into an empty slab; True once that holds its first `stored.length` tokens, which
        are fewer where a file is damaged or has gone."""
        before = self.counts.read_bytes
        try:
            while stored.at < len(stored.names):
                if self.counts.read_bytes - before >= TURN_BYTES:
                    return False
                first = stored.at * BLOCK
                end = min(first + BLOCK, stored.length)
                self._read(stored.names[stored.at], KEPT, self._cache.memory(slab, first, end))
                stored.at += 1
            self._cache.filled(slab, stored.length)
            if self._cache.has_ends:
                self._read(stored.names[-1], END, self._cache.end_memory(slab, stored.length))
        except (DamagedError, OSError):
            stored.length = 0 if self._cache.has_ends else stored.at * BLOCK
            self._cache.filled(slab, stored.length)
        self.folder.used(stored.names[: stored.at])
        self.counts.hits += stored.length > 0
        return True

    def offer(self, slab: int, tokens: list[int]) -> None:
        """The slab holds these tokens, and will until it is withdrawn; further ones may be added one by one."""
        with self._changed:
            if tokens and self._writes and not self._closing:
                earlier = self._waiting.get(slab)
                ends = [end for end in earlier.ends if end <= earlier.limit] if earlier else []
                ends.append(len(tokens))
                self._waiting[slab] = _Job(slab, list(tokens), ends, len(tokens), goes_on=True)
                self._changed.notify_all()

    def withdraw(self, slab: int, length: int = 0) -> None:
        """The slab's positions from `length` on are about to change."""
        with self._changed:
            for job in (self._waiting.get(slab), self._current):
                if job is not None and job.slab == slab:
                    job.limit, job.goes_on = min(job.limit, length), False

    def close(self, grace_s: float) -> None:
        """Ends the writing, after so many seconds for what is still to be written."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting and self._current is None, grace_s)
            self._waiting.clear()
            if self._current is not None:
                self._current.limit = 0
        self._thread.join()

    def _longest(self, before: bytes, tokens: list[int], ends: set[bytes] | None) -> tuple[bytes, int] | None:
        """The block behind `before` that holds most of `tokens` and can be gone on from: its name and how many. ends:
        names of those with what goes on from their end, None where nothing needs that."""
        names = names_of(before, tokens)
        for count in range(len(names), 0, -1):
            name = names[count - 1]
            if (ends is None or name in ends) and self.folder.has(name, KEPT):
                return name, count
        return None

    def _read(self, name: bytes, kind: str, memory: Memory) -> None:
        path = self.folder.path(name, kind)
        try:
            self.counts.read_bytes += read(path, name, memory)
        except (DamagedError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EIO:
                raise  # another process has made room, or keeps its files to itself
            self.counts.dropped += 1
            with contextlib.suppress(OSError):
                path.unlink()
            self._warn(f"note: {path} {error}; it was removed, and its tokens are computed again")
            raise

    def _run(self) -> None:
        while True:
            with self._changed:
                self._current = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                job = self._current = self._waiting.pop(next(iter(self._waiting)))
            try:
                self._write(job)
            except OSError as error:
                self._stop(error)

    def _write(self, job: _Job) -> None:
        """Writes the blocks of a slab that are not there yet, and what is left behind them at each of its ends."""
        before, names, tokens = self._first_name, list[bytes](), job.tokens
        for first in range(0, len(tokens), BLOCK):
            last = min(first + BLOCK, len(tokens))
            for end in sorted({last, *(end for end in job.ends if first < end < last)}):
                name = name_of(before, tokens[first:end])
                if not self._write_block(job, name, first, end):
                    self.folder.used(names)
                    return
                names.append(name)
            before = names[-1]
        self.folder.used(names)

    def _write_block(self, job: _Job, name: bytes, first: int, end: int) -> bool:
        """Writes a block, but one that is not full and that nothing can go on from: it would be of no use. False where
        its positions have gone, or there is no room: then those behind it are of no use either."""

        def stays() -> bool:
            return end <= job.limit

        def goes_on() -> bool:
            return job.goes_on and self._cache.can_crop(job.slab, end, ahead=1)

        needed = self._cache.has_ends and not self.folder.has(name, END)
        if needed and end % BLOCK and not goes_on():
            return stays()
        if not self._keep(name, KEPT, list(self._cache.memory(job.slab, first, end)), stays):
            return False
        if needed and goes_on():
            self._keep(name, END, list(self._cache.end_memory(job.slab, end)), goes_on)
        return True

    def _keep(self, name: bytes, kind: str, memory: Memory, still: Callable[[], bool]) -> bool:
        """Writes a file unless it is there; whether it is now."""
        if self.folder.has(name, kind):
            return True
        if not still() or not self.folder.make_room(HEAD_BYTES + sum(each.nbytes for each in memory)):
            return False
        nbytes = write(self.folder.path(name, kind), name, memory, still)
        self.counts.written_bytes += nbytes
        return nbytes > 0

    def _stop(self, error: OSError) -> None:
        """Nothing more is written: a full drive is nothing that a server can mend."""
        with self._changed:
            self._writes = False
            self._waiting.clear()
        self._warn(
            f"note: cannot write to {self.folder.root} ({error.strerror or error}); conversations are no longer kept "
            f"on disk, those that lie there are still used"
        )


def folder_for(root: Path, most: int, blueprint: Blueprint, asked: Settings) -> PrefixFolder:
    """The folder `root`, of `most` bytes at the most, for the conversations of a model. ConfigError where it cannot be
    used, a conversation does not fit, or the model's cache has no form on disk: before minutes of loading."""
    used = resolve_for(blueprint, asked).settings
    option, device = "--prefix-disk", resolve_device(used.device)
    sizes = sizes_for(option, option, "has no form on disk", blueprint, used, device)
    shapes, context = [each.shape for each in sizes], context_of(blueprint, used)
    check_size(most, shapes, context, min(used.chunk, context), blueprint.dtype.itemsize, used.kv_bits)
    return PrefixFolder(root, most)


def disk_of(engine: Any, folder: PrefixFolder, warn: Callable[[str], None]) -> Callable[[KVCache], PrefixDisk]:
    """What makes a `PrefixDisk` of an engine's cache."""
    facts = json.dumps(numerics(engine), sort_keys=True).encode()
    return lambda cache: PrefixDisk(cache, folder, first_name(facts), warn)
