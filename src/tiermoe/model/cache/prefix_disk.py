"""Prefix cache on disk: prefixes of conversations, written in the background from their slabs, read back into free
ones.

A prefix is a chain of blocks of tokens, a file each, so that conversations that begin alike share files and a longer
one adds its new blocks alone. A file's name is a digest of all tokens up to the block's end and of everything else that
the values follow from: a process that finds the name may use the file, and one that computes other numbers finds none.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from tiermoe.config import MIB, format_size
from tiermoe.errors import ConfigError
from tiermoe.model.cache.kv import KVCache, LayerShape, with_beside
from tiermoe.platform.file_io import read_ahead

BLOCK = 64
"""Tokens of a block."""
KEPT, END = "kv", "end"
"""Kinds of files: the positions of a block, in layers that keep all of them; what layers with a window or a recurrent
state need to go on from the block's end."""
HEAD_BYTES = 24
TURN_BYTES = 32 * MIB
"""Bytes that are read of a prefix before the answers under way have a turn."""
_AHEAD = 8  # blocks of a prefix that the drive reads while one is copied and checked
_MAGIC = b"tmoekv\x00\x01"
_BUFFER = MIB
_NAMES = re.compile(r"(\.[0-9a-f]{8}-)?([0-9a-f]{40})\.(kv|end)")
_SCAN_S = 5  # between two looks at what other processes have written
_LEFT_S = 3600  # after which an unfinished file belongs to a process that is gone

Memory = Iterable[memoryview]


class DamagedError(Exception):
    """A file that is torn, or that is not what its name says."""


def check_size(size: int, shapes: Sequence[LayerShape], context: int, step: int, itemsize: int, bits: int) -> None:
    """ConfigError if a folder of `size` bytes cannot hold one sequence of `context` tokens.

    step: tokens that run at once. itemsize, bits: of keys and values."""
    blocks = -(-context // BLOCK)
    needed = 2 * HEAD_BYTES * blocks
    for shape in with_beside(shapes):
        window = shape.window
        rows = context // shape.stride if window is None else min(blocks, step // BLOCK + 2) * min(window, context)
        needed += rows * shape.row_bytes(itemsize, bits)
        needed += shape.state.nbytes(itemsize) if shape.state is not None else 0
    if size < needed:
        raise ConfigError(
            f"--prefix-disk-size {format_size(size)} is less than one conversation of {context:,} tokens takes, "
            f"{needed:,} bytes; raise it, or lower --context"
        )


def first_name(facts: bytes) -> bytes:
    """First link of every chain of names. facts: all that the values follow from beside the tokens."""
    return hashlib.blake2b(_MAGIC + facts, digest_size=20).digest()


def name_of(before: bytes, tokens: Sequence[int]) -> bytes:
    """Name of a block of at most `BLOCK` tokens that follows the block `before`, or `first_name`."""
    return hashlib.blake2b(before + np.asarray(tokens, "<i4").tobytes(), digest_size=20).digest()


def names_of(before: bytes, tokens: Sequence[int]) -> list[bytes]:
    """`name_of` of the first token, of the first two, and so on."""
    digest, found, written = hashlib.blake2b(before, digest_size=20), list[bytes](), np.asarray(tokens, "<i4").tobytes()
    for at in range(0, len(written), 4):
        digest.update(written[at : at + 4])
        found.append(digest.digest())
    return found


def write(path: Path, name: bytes, memory: Memory, still: Callable[[], bool]) -> int:
    """Writes `memory` to a file that is there whole or not at all (its checksum finds what a power failure tears), and
    returns its bytes. still: whether the memory has kept its contents, asked once all of it is read; where it has not,
    nothing is written and 0 is returned."""
    temporary = path.with_name(f".{os.urandom(4).hex()}-{path.name}")
    checksum = xxhash.xxh3_128(name)
    try:
        with open(temporary, "wb", _BUFFER, opener=_private) as file:
            file.write(_MAGIC + bytes(HEAD_BYTES - len(_MAGIC)))
            for each in memory:
                checksum.update(each)
                file.write(each)
            nbytes = file.tell()
            file.seek(len(_MAGIC))
            file.write(checksum.digest())
        if still():
            os.replace(temporary, path)
            return nbytes
        return 0
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def read(path: Path, name: bytes, memory: Memory) -> tuple[int, bytes]:
    """Reads a file into `memory` and returns its bytes and its checksum. DamagedError if the file is not what was
    written under this name; `memory` then holds nothing of use."""
    checksum, nbytes = xxhash.xxh3_128(name), HEAD_BYTES
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
        if not head.startswith(_MAGIC):
            raise DamagedError("is no file of this version of tiermoe")
        for each in memory:
            if file.readinto(each) < each.nbytes:
                raise DamagedError("is cut short")
            checksum.update(each)
            nbytes += each.nbytes
        if file.read(1) or checksum.digest() != head[len(_MAGIC) :]:
            raise DamagedError("does not have its checksum")
    return nbytes, checksum.digest()


def checksum_of(path: Path) -> bytes:
    """The checksum that a file says it has; empty if there is none."""
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        return file.read(HEAD_BYTES)[len(_MAGIC) :]
    return b""


def _read_ahead(path: Path) -> None:
    """Asks the system for a file that is read soon; one that is gone is found missing then."""
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        read_ahead(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def _private(path: str, flags: int) -> int:
    """Opens a file that no other user may read: it has the text of conversations."""
    return os.open(path, flags, 0o600)


class PrefixFolder:
    """Folder of prefix files, of `size` bytes at most; the least recently used files go first.

    Several processes may use it at once: each looks at its files every few seconds. ConfigError if it cannot be
    written to."""

    def __init__(self, root: Path, size: int) -> None:
        self.root, self.size = root, size
        self.nbytes = 0  # of its files
        self._scanned = 0.0
        self._oldest: deque[tuple[int, int, str]] = deque()  # (time of last use in ns, bytes, name)
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=root):
                pass
        except OSError as error:
            raise ConfigError(
                f"--prefix-disk {root} cannot be written to ({error.strerror}); name a folder that can"
            ) from error
        self._scan()

    def path(self, name: bytes, kind: str) -> Path:
        """File of a name."""
        return self.root / f"{name.hex()}.{kind}"

    def has(self, name: bytes, kind: str) -> bool:
        """Whether there is such a file."""
        return self.path(name, kind).exists()

    def names(self, kind: str) -> set[bytes]:
        """Names of all files of a kind."""
        try:
            found = [_NAMES.fullmatch(each) for each in os.listdir(self.root) if each.endswith(kind)]
        except OSError:
            return set()
        return {bytes.fromhex(each[2]) for each in found if each is not None and not each[1]}

    def used(self, names: Sequence[bytes]) -> None:
        """Records the use of a chain, whose last blocks are removed first."""
        now = time.time_ns()
        for later, name in enumerate(names):
            for kind in (KEPT, END):
                with contextlib.suppress(OSError):
                    os.utime(self.path(name, kind), ns=(now, now - 1000 * later))

    def make_room(self, nbytes: int) -> bool:
        """Removes the least recently used files until so many bytes can be written; whether they can."""
        if time.monotonic() - self._scanned > _SCAN_S:
            self._scan()
        for _ in range(2):
            while self.nbytes + nbytes > self.size and self._oldest:
                self._remove(*self._oldest.popleft())
            if self.nbytes + nbytes <= self.size:
                self.nbytes += nbytes
                return True
            self._scan()  # files written since the last scan can go as well
        return False

    def _scan(self) -> None:
        found, self.nbytes = [], 0
        with os.scandir(self.root) as entries:
            for entry in entries:
                if _NAMES.fullmatch(entry.name) is None:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    self.nbytes += status.st_size
                    if not entry.name.startswith(".") or time.time() - status.st_mtime > _LEFT_S:
                        found.append((status.st_mtime_ns, status.st_size, entry.name))
        self._oldest = deque(sorted(found))
        self._scanned = time.monotonic()

    def _remove(self, used_at: int, nbytes: int, name: str) -> None:
        """Removes a file, unless it has been used meanwhile."""
        path = self.root / name
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime_ns != used_at:
                return
            path.unlink()
        self.nbytes -= nbytes


@dataclass(slots=True)
class StoredPrefix:
    """A prefix that lies on disk."""

    names: list[bytes]  # of its blocks
    length: int  # tokens; once it has been read, those that could be
    at: int = 0  # blocks that have been read
    checksums: tuple[bytes, ...] = ()  # of the blocks of a slab that a request has lost, which wants no other bits

    def unread(self) -> StoredPrefix:
        """The same prefix before any reading."""
        return replace(self, names=self.names[: -(-self.length // BLOCK)], at=0)


@dataclass(slots=True)
class DiskCounts:
    """Counters since the start."""

    hits: int = 0  # requests whose prefix was read from disk
    written_bytes: int = 0
    read_bytes: int = 0
    dropped: int = 0  # damaged files that were removed


@dataclass(slots=True)
class _WriteJob:
    """Tokens of a slab that are to be written."""

    slab: int
    tokens: list[int]
    ends: list[int]  # lengths of the prefixes that are likely to be asked for again
    limit: int  # positions that stay as they are
    goes_on: bool  # only steps after the tokens change what layers with a window or a state hold


class PrefixDisk:
    """Prefix cache on disk: keeps the contents of slabs of `cache` in a folder.

    first: `first_name` of the engine. warn: called with a line for each thing that went wrong.

    Nothing waits for it: a slab that is needed is withdrawn, whether or not it has been written. A thread of its own
    writes one file at a time, from where the values lie."""

    def __init__(self, cache: KVCache, folder: PrefixFolder, first: bytes, warn: Callable[[str], None]) -> None:
        self.counts = DiskCounts()
        self.folder = folder
        self._cache = cache
        self._first_name = first
        self._warn = warn
        self._waiting: dict[int, _WriteJob] = {}  # slab → job
        self._current: _WriteJob | None = None
        self._writes = True
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tiermoe-prefixes", daemon=True)
        self._thread.start()

    def find(self, ids: list[int]) -> StoredPrefix | None:
        """The longest prefix of `ids` that is there whole."""
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
                return StoredPrefix([*names[1:count], found[0]], first + found[1])
        return None

    def saved(self, slab: int, tokens: list[int]) -> StoredPrefix | None:
        """The whole blocks that a slab's tokens begin with and that are there with the slab's bits: who ran in other
        steps may have written others. None if there are none, or if a layer needs more than blocks."""
        names, checksums = list[bytes](), list[bytes]()
        for first in range(0, 0 if self._cache.has_ends else len(tokens) - BLOCK + 1, BLOCK):
            name = name_of(names[-1] if names else self._first_name, tokens[first : first + BLOCK])
            checksum = xxhash.xxh3_128(name)
            for each in self._cache.memory(slab, first, first + BLOCK):
                checksum.update(each)
            if checksum_of(self.folder.path(name, KEPT)) != checksum.digest():
                break
            names.append(name)
            checksums.append(checksum.digest())
        return StoredPrefix(names, BLOCK * len(names), checksums=tuple(checksums)) if names else None

    def fill(self, stored: StoredPrefix, slab: int) -> bool:
        """Reads some of a prefix into an empty slab; True once the slab holds `stored.length` tokens, which are fewer
        where a file is damaged or gone."""
        before = self.counts.read_bytes
        try:
            while stored.at < len(stored.names):
                if self.counts.read_bytes - before >= TURN_BYTES:
                    return False
                first = stored.at * BLOCK
                end = min(first + BLOCK, stored.length)
                for later in stored.names[stored.at + _AHEAD : stored.at + _AHEAD + 1]:
                    _read_ahead(self.folder.path(later, KEPT))
                checksum = self._read(stored.names[stored.at], KEPT, self._cache.memory(slab, first, end))
                if stored.checksums and checksum != stored.checksums[stored.at]:
                    raise FileNotFoundError  # it was removed, and written by who ran in other steps
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
        """Writes a slab's tokens when there is time. The slab keeps them until it is withdrawn; further tokens may be
        added one by one."""
        with self._changed:
            if tokens and self._writes and not self._closing:
                earlier = self._waiting.get(slab)
                ends = [end for end in earlier.ends if end <= earlier.limit] if earlier else []
                ends.append(len(tokens))
                self._waiting[slab] = _WriteJob(slab, list(tokens), ends, len(tokens), goes_on=True)
                self._changed.notify_all()

    def withdraw(self, slab: int, length: int = 0) -> None:
        """The slab's positions from `length` on are about to change."""
        with self._changed:
            for job in (self._waiting.get(slab), self._current):
                if job is not None and job.slab == slab:
                    job.limit, job.goes_on = min(job.limit, length), False

    def close(self, grace_s: float) -> None:
        """Stops writing, after so many seconds for what is still to be written."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting and self._current is None, grace_s)
            self._waiting.clear()
            if self._current is not None:
                self._current.limit = 0
        self._thread.join()

    def _longest(self, before: bytes, tokens: list[int], ends: set[bytes] | None) -> tuple[bytes, int] | None:
        """Name and length of the block after `before` that holds most of `tokens` and that a request can go on from.
        ends: names of the blocks with an END file; None if no layer needs one."""
        names = names_of(before, tokens)
        for count in range(len(names), 0, -1):
            name = names[count - 1]
            if (ends is None or name in ends) and self.folder.has(name, KEPT):
                return name, count
        return None

    def _read(self, name: bytes, kind: str, memory: Memory) -> bytes:
        """Reads a file; its checksum."""
        path = self.folder.path(name, kind)
        try:
            nbytes, checksum = read(path, name, memory)
        except (DamagedError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EIO:
                raise  # another process has made room, or keeps its files to itself
            self.counts.dropped += 1
            with contextlib.suppress(OSError):
                path.unlink()
            self._warn(f"note: {path} {error}; it was removed, and its tokens are computed again")
            raise
        self.counts.read_bytes += nbytes
        return checksum

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

    def _write(self, job: _WriteJob) -> None:
        """Writes the blocks of a slab that are not there yet, and a shorter block for each of its ends."""
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

    def _write_block(self, job: _WriteJob, name: bytes, first: int, end: int) -> bool:
        """Writes a block, unless it is not full and no request could go on from it. False if its positions have
        gone, or if there is no room: the blocks after it are of no use then."""

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
        """Writes a file unless it is there; whether it is there now."""
        if self.folder.has(name, kind):
            return True
        if not still() or not self.folder.make_room(HEAD_BYTES + sum(each.nbytes for each in memory)):
            return False
        nbytes = write(self.folder.path(name, kind), name, memory, still)
        self.counts.written_bytes += nbytes
        return nbytes > 0

    def _stop(self, error: OSError) -> None:
        """Ends the writing for good: a server cannot mend a full drive."""
        with self._changed:
            self._writes = False
            self._waiting.clear()
        self._warn(
            f"note: cannot write to {self.folder.root} ({error.strerror or error}); conversations are no longer kept "
            f"on disk, those that lie there are still used"
        )
