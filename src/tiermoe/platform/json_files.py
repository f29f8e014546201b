"""JSON of untrusted files: size and depth are bounded before anything is built from it."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path, PureWindowsPath
from typing import Any

from tiermoe.config import MIB, format_size

MOST_BYTES = 64 * MIB
"""The index of a checkpoint with 200,000 tensors has 20 MB."""
DEEPEST = 64
"""Arrays and objects inside each other."""
_TOO_DEEP = f"it is nested deeper than {DEEPEST} arrays and objects"


def read_json(file: Path, most: int = MOST_BYTES) -> Any:
    """The document in a file of at most `most` bytes. OSError if the file cannot be read. ValueError, with the
    reason, where it is larger, no JSON, or too deep."""
    with open(file, "rb") as handle:
        text = handle.read(most + 1)
    if len(text) > most:
        raise ValueError(f"it has more than {format_size(most)}")
    return parse_json(text)


def parse_json(text: bytes | str) -> Any:
    """The document in `text`. ValueError if it is no JSON, or deeper than `DEEPEST`."""
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [document]
    for _ in range(DEEPEST):
        level = [inner for each in level for inner in _items(each) if isinstance(inner, dict | list)]
        if not level:
            return document
    raise ValueError(_TOO_DEEP)


def _items(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def stays_inside(name: str) -> bool:
    """Whether a file name in a document stays in the document's folder. The name alone decides: the hub's cache links
    its files from elsewhere. TypeError if the name is no text."""
    path = PureWindowsPath(name)  # knows both separators, and drives
    return bool(path.parts) and not path.anchor and ".." not in path.parts


def replace_unlocked(path: Path, content: bytes) -> None:
    """Replaces a small file that can be lost, without the folder's lock: several processes may do so at once, and the
    last one stays. Where it cannot be written nothing happens."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
