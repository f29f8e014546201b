"""JSON that comes from outside: its size and its depth are bounded before anything is made of it."""

from __future__ import annotations

import json
from pathlib import Path, PureWindowsPath
from typing import Any

from tiermoe.config import MIB, format_size

MOST_BYTES = 64 * MIB
"""The index of a checkpoint with 200,000 tensors has 20 MB."""
DEEPEST = 64
"""Arrays and objects inside each other."""


def read_json(file: Path, most: int = MOST_BYTES) -> Any:
    """The document in a file of at most `most` bytes. OSError where the file cannot be read, ValueError, with the
    reason, where it is larger or as `parse_json`."""
    with open(file, "rb") as handle:
        text = handle.read(most + 1)
    if len(text) > most:
        raise ValueError(f"it has more than {format_size(most)}")
    return parse_json(text)


def parse_json(text: bytes | str) -> Any:
    """The document that `text` is. ValueError where it is no JSON, or deeper than `DEEPEST`."""
    try:
        document = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    level = [document]
    for _ in range(DEEPEST):
        level = [inner for each in level for inner in _inside(each) if isinstance(inner, dict | list)]
        if not level:
            return document
    raise _too_deep()


def stays_inside(name: str) -> bool:
    """Whether a file that a document names lies in the document's folder, by its name alone: the hub's cache links its
    files from elsewhere. TypeError where the name is no text."""
    path = PureWindowsPath(name)  # knows both separators, and drives
    return bool(path.parts) and not path.anchor and ".." not in path.parts


def _inside(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {DEEPEST} arrays and objects")
