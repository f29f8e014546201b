"""One sequence of tokens that grows: a prompt is read, generated tokens are added, a beginning is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tiermoe.batch import Batch, decode, prompt
from tiermoe.engine.steps import SequenceCache

OnRead = Callable[[int, int], None]


class Sequence:
    """The tokens of a sequence whose keys and values lie in a slab of `cache`. `tokens`: those that have run."""

    def __init__(self, engine: Any, cache: SequenceCache) -> None:
        self._engine = engine
        self._cache = cache
        self._slab = cache.open()
        self.tokens: list[int] = []

    def read(self, ids: list[int], on_read: OnRead = lambda done, total: None) -> Tensor:
        """Runs what `ids` has beyond the beginning that it shares with the sequence, at least its last token; what the
        sequence held beyond that is forgotten → logits (vocabulary) of the last token. on_read: called after each chunk
        with the tokens of `ids` that have run, and how many there are."""
        self._keep(shared(self.tokens, ids[:-1]))
        chunk = self._engine.settings.chunk
        for begin in range(len(self.tokens), len(ids), chunk):
            row = prompt(self._slab, ids[begin : begin + chunk], begin)
            logits: Tensor = self._engine.step(Batch((row,)), self._cache)[0]
            self.tokens = ids[: row.end]
            on_read(row.end, len(ids))
        return logits

    def add(self, token: int) -> Tensor:
        """Runs a generated token → logits (vocabulary)."""
        row = decode(self._slab, len(self.tokens), token)
        logits: Tensor = self._engine.step(Batch((row,)), self._cache)[0]
        self.tokens.append(token)
        return logits

    def close(self) -> None:
        """Gives the slab back."""
        self._cache.close(self._slab)

    def _keep(self, length: int) -> None:
        """The first `length` tokens, or none where a sliding window cannot be wound back to them."""
        held = self._cache.length(self._slab)  # an interrupted step may have written more, or less, than `tokens`
        length = min(length, held)
        try:
            self._cache.crop(self._slab, length)
        except ValueError:
            length = 0
            self._cache.close(self._slab)
            self._slab = self._cache.open()
        self.tokens = self.tokens[:length]


def shared(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def end_tokens(config: Any) -> set[int]:
    """The tokens that end an answer, as a generation config names them."""
    named = getattr(config, "eos_token_id", None)
    if named is None:
        return set()
    return set(named) if isinstance(named, list | tuple) else {int(named)}
