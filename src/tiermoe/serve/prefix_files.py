"""Keys and values of conversations' beginnings as files: their names, what they hold, and a folder of bounded size.

A beginning is a chain of blocks of tokens, a file each, so that conversations that begin alike share files and a longer
one adds its new blocks alone. A name is a digest of all tokens up to the block's end and of everything else that the
values follow from: whoever finds the name may use what lies there, and whoever computes with other numbers finds none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from tiermoe.config import MIB, format_size
from tiermoe.errors import ConfigError
from tiermoe.model.kv_cache import LayerShape

BLOCK = 64  # tokens of a block
KEPT, END = "kv", "end"
"""Kinds of files: the positions of a block, in layers that keep all of them; what layers with a window, or a recurrent
state, need to go on from the block's end."""
HEAD_BYTES = 24
_MAGIC = b"tmoekv\x00\x01"
_BUFFER = MIB
_NAMES = re.compile(r"(\.[0-9a-f]{8}-)?([0-9a-f]{40})\.(kv|end)")
_SCAN_S = 5  # after which what other processes have written is looked at again
_LEFT_S = 3600  # after which a file that is not whole was left by a process that is gone

Memory = Iterable[memoryview]


class DamagedError(Exception):
    """A file that is torn, or not what its name says."""


def check_size(size: int, shapes: Sequence[LayerShape], context: int, step: int, itemsize: int, bits: int) -> None:
    """ConfigError where a folder of `size` bytes cannot hold one sequence of `context` tokens, of which `step` run at
    once. itemsize, bits: of keys and values."""
    blocks = -(-context // BLOCK)
    needed = 2 * HEAD_BYTES * blocks
    for shape in shapes:
        positions = context if shape.window is None else min(blocks, step // BLOCK + 2) * min(shape.window, context)
        needed += positions * shape.row_bytes(itemsize, bits)
        needed += shape.state.nbytes(itemsize) if shape.state is not None else 0
    if size < needed:
        raise ConfigError(
            f"--prefix-disk-size {format_size(size)} is less than one conversation of {context:,} tokens takes, "
            f"{needed:,} bytes; raise it, or lower --context"
        )


def first_name(facts: bytes) -> bytes:
    """What every chain of names begins with. facts: all that values follow from beside the tokens."""
    return hashlib.blake2b(_MAGIC + facts, digest_size=20).digest()


def name_of(before: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a block of at most `BLOCK` tokens behind the block `before`, or behind what `first_name` gave."""
    return hashlib.blake2b(before + np.asarray(tokens, "<i4").tobytes(), digest_size=20).digest()


def names_of(before: bytes, tokens: Sequence[int]) -> list[bytes]:
    """`name_of` of the first token, the first two, …"""
    digest, found, written = hashlib.blake2b(before, digest_size=20), list[bytes](), np.asarray(tokens, "<i4").tobytes()
    for at in range(0, len(written), 4):
        digest.update(written[at : at + 4])
        found.append(digest.digest())
    return found


def write(path: Path, name: bytes, memory: Memory, still: Callable[[], bool]) -> int:
    """Writes what lies in `memory` to a file that is there whole or not at all; its bytes. (What a power failure tears
    its checksum finds.) still: asked once all has been read, whether the memory held what is meant until then; else
    nothing is written: 0."""
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


def read(path: Path, name: bytes, memory: Memory) -> int:
    """Reads a file into `memory`; its bytes. DamagedError where it is not what was written under this name: then what
    lies in `memory` means nothing."""
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
    return nbytes


def _private(path: str, flags: int) -> int:
    """Opens a file that nobody else may read: what it holds was said to the server."""
    return os.open(path, flags, 0o600)


class PrefixFolder:
    """A folder of such files, of `size` bytes at the most; those that were used least recently go first. Several
    processes may use it at once: each looks at what is there every few seconds. ConfigError where it cannot be written
    to."""

    def __init__(self, root: Path, size: int) -> None:
        self.root, self.size = root, size
        self.held = 0
        self._scanned = 0.0
        self._oldest: deque[tuple[int, int, str]] = deque()  # (time of last use, bytes, name)
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
        """The file of a name."""
        return self.root / f"{name.hex()}.{kind}"

    def has(self, name: bytes, kind: str) -> bool:
        """Whether there is such a file."""
        return self.path(name, kind).exists()

    def names(self, kind: str) -> set[bytes]:
        """Of all files of a kind that are there."""
        try:
            found = [_NAMES.fullmatch(each) for each in os.listdir(self.root) if each.endswith(kind)]
        except OSError:
            return set()
        return {bytes.fromhex(each[2]) for each in found if each is not None and not each[1]}

    def used(self, names: Sequence[bytes]) -> None:
        """Notes the use of a chain, of which the last ones go first."""
        now = time.time_ns()
        for later, name in enumerate(names):
            for kind in (KEPT, END):
                with contextlib.suppress(OSError):
                    os.utime(self.path(name, kind), ns=(now, now - 1000 * later))

    def make_room(self, nbytes: int) -> bool:
        """Removes what was used least recently, so that so many more bytes can be written; whether they can."""
        if time.monotonic() - self._scanned > _SCAN_S:
            self._scan()
        for _ in range(2):
            while self.held + nbytes > self.size and self._oldest:
                self._remove(*self._oldest.popleft())
            if self.held + nbytes <= self.size:
                self.held += nbytes
                return True
            self._scan()  # what has been written since the last time can go as well
        return False

    def _scan(self) -> None:
        found, self.held = [], 0
        with os.scandir(self.root) as entries:
            for entry in entries:
                if _NAMES.fullmatch(entry.name) is None:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    told = entry.stat()
                    self.held += told.st_size
                    if not entry.name.startswith(".") or time.time() - told.st_mtime > _LEFT_S:
                        found.append((told.st_mtime_ns, told.st_size, entry.name))
        self._oldest = deque(sorted(found))
        self._scanned = time.monotonic()

    def _remove(self, used_at: int, nbytes: int, name: str) -> None:
        """Removes a file, unless it has been used meanwhile."""
        path = self.root / name
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime_ns != used_at:
                return
            path.unlink()
        self.held -= nbytes
