"""A text's own tokens fed to a transformers model or an engine: the routing of real text, the same for every engine."""

from __future__ import annotations

from typing import Any

from tiermoe.batch import Batch, decode, prompt


class Feeding:
    """Rows of token ids `ids` (batch, prompt + output) for `model`. chunk: tokens of the prompt that run at once, None
    all of them. Begins with an empty key/value cache. Call it without gradients."""

    def __init__(self, model: Any, ids: Any, prompt: int, chunk: int | None = None) -> None:
        self._model, self._ids, self._prompt = model, ids, prompt
        self._chunk = chunk or prompt
        self._cache: Any = None

    def prompt(self) -> None:
        """The rows' prompts."""
        for begin in range(0, self._prompt, self._chunk):
            self._run(begin, min(begin + self._chunk, self._prompt))

    def decode(self, until: int) -> None:
        """The tokens from the prompt's end to position `until`, one of each row at a time."""
        for at in range(self._prompt, until):
            self._run(at, at + 1)

    def _run(self, begin: int, end: int) -> None:
        output = self._model(
            input_ids=self._ids[:, begin:end], past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        self._cache = output.past_key_values


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
