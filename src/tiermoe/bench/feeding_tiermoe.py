"""A text's own tokens fed to an engine, as its own loops do."""

from __future__ import annotations

from typing import Any

from tiermoe.batch import Batch, decode, prompt


class EngineFeeding:
    """Rows of token ids `ids` (batch, prompt + output) for an engine, with an empty KV cache."""

    def __init__(self, engine: Any, ids: Any, first: int) -> None:
        self._engine = engine
        self._ids: list[list[int]] = ids.tolist()
        self._first = first
        self._cache = engine.new_cache(len(self._ids), len(self._ids[0]))
        self._slabs = [self._cache.open() for _ in self._ids]

    def prompt(self) -> None:
        """The rows' prompts."""
        rows = [prompt(slab, ids[: self._first]) for slab, ids in zip(self._slabs, self._ids, strict=True)]
        self._engine.step(Batch(tuple(rows)), self._cache)

    def decode(self, until: int) -> None:
        """The tokens from the prompt's end to position `until`, one of each row at a time."""
        for at in range(self._first, until):
            rows = [decode(slab, at, ids[at]) for slab, ids in zip(self._slabs, self._ids, strict=True)]
            self._engine.step(Batch(tuple(rows)), self._cache)
