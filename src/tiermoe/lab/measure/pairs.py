"""Documents with their summaries, which a metric of answers is measured on. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tiermoe.errors import ConfigError
from tiermoe.platform.json_files import parse_json

Pair = tuple[str, str]
"""A document and its summary."""


def read_pairs(path: Path) -> list[Pair]:
    """The documents of a file with their summaries: one JSON object with both a line. ConfigError, naming the line,
    for anything else."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); name a text file") from error
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            pair = parse_json(line)
            pairs.append((str(pair["document"]), str(pair["summary"])))
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"line {number} of {path} is no document with its summary; write each as "
                f'{{"document": "...", "summary": "..."}}'
            ) from None
    return pairs


def require_pairs(pairs: Sequence[Pair]) -> Sequence[Pair]:
    """The pairs. ConfigError for fewer than two."""
    if len(pairs) < 2:
        raise ConfigError(
            f"documents with summaries are needed, two at least, since the first only warms the expert cache; there "
            f"are {len(pairs)}"
        )
    return pairs
