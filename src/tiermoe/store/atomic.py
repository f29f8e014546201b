"""Files that are whole or not there, however the writing of them ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PARTIAL = ".partial"


@contextlib.contextmanager
def whole_or_nothing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, and to read back, that becomes `path` once it is whole and synced, and is removed where writing
    fails. For who holds the lock of the folder: the unfinished file always has the same name."""
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
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name too survives a power failure, before another file speaks of it
    finally:
        os.close(folder)


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces the content of `path`: a reader sees the old or the new one."""
    with whole_or_nothing(path) as handle:
        handle.write(content)
