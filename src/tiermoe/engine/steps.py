"""Running batches: the one way into a model, for prompts and generated tokens, our own loops and transformers'."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from tiermoe.batch import Batch, Kind, Row
from tiermoe.engine.fallback import ConfidentDecoding
from tiermoe.engine.passes import CurrentPass
from tiermoe.errors import ModelError
from tiermoe.model.finite import NotFiniteError
from tiermoe.types import FEW_TOKENS


class SequenceCache(Protocol):
    """Keys and values of sequences, in slabs (`model.kv_cache.KVCache`, `model.generic.GenericCache`)."""

    def open(self) -> int: ...

    def close(self, slab: int) -> None: ...

    def length(self, slab: int) -> int: ...

    def reached(self, slab: int) -> int: ...

    def kept(self, slab: int, length: int) -> int: ...

    def crop(self, slab: int, length: int) -> None: ...

    def fork(self, slab: int, length: int | None = None) -> int: ...

    def nbytes(self, positions: int) -> int: ...

    def nbytes_held(self, slab: int) -> int: ...


class AnyDecoder(Protocol):
    """Computes batches (`model.decoder.Decoder`, `model.generic.GenericDecoder`).

    rows_together: several rows in one step. verifies: tokens that are verified together get the bits that each gets
    alone. rewinds: a sequence's last step can be taken back."""

    @property
    def rows_together(self) -> bool: ...

    @property
    def verifies(self) -> bool: ...

    @property
    def rewinds(self) -> bool: ...

    def new_cache(self, slabs: int, context: int, step: int) -> SequenceCache: ...

    def require_finite(self) -> Callable[[], None]: ...

    def step(self, batch: Batch, cache: Any, every: bool = False) -> Tensor: ...


class Steps:
    """A decoder over its experts. chunk: tokens of a prompt that run at once. context: tokens that a sequence has room
    for unless more are asked for."""

    def __init__(
        self,
        decoder: AnyDecoder,
        current: CurrentPass,
        confident: ConfidentDecoding | None,
        chunk: int,
        context: int,
    ) -> None:
        self.decoder = decoder
        self.confident = confident
        self._current = current
        self.chunk = chunk
        self._context = context

    def new_cache(self, sequences: int = 1, context: int | None = None) -> Any:
        """A cache (`SequenceCache`) for so many sequences of up to `context` tokens."""
        return self.decoder.new_cache(sequences, context or self._context, self.chunk)

    @torch.no_grad()
    def step(self, batch: Batch, cache: Any, every: bool = False) -> Tensor:
        """Runs a batch and returns the logits (rows, vocabulary) of each row's last token, or of every token of all
        rows (T, vocabulary). Prompts run in chunks. Threads wait for each other. ModelError where logits are not
        finite, which names the layer that they come from."""
        return self._current.alone(lambda: self._checked(batch, cache, every))

    def _checked(self, batch: Batch, cache: Any, every: bool) -> Tensor:
        logits = self._step(batch, cache, every)
        if is_finite(logits):
            return logits
        undo = self.decoder.require_finite()
        try:
            self._step(batch, cache, every)
        except NotFiniteError as error:
            raise not_finite(str(error)) from None
        except ValueError:  # the sequence cannot be wound back for another run
            pass
        finally:
            undo()
        raise not_finite()

    def _step(self, batch: Batch, cache: Any, every: bool) -> Tensor:
        if len(batch.rows) > 1 and self._by_rows(batch):
            return torch.cat([self._step(Batch((row,)), cache, every) for row in batch.rows])
        row = batch.rows[0]
        if row.kind is Kind.VERIFY and len(row.tokens) > self._verified_at_once:
            return self._in_parts(row, cache, every)
        if max(len(row.tokens) for row in batch.rows) <= self.chunk:
            return self._pass(batch, cache, every)
        return self._in_chunks(batch, cache, every)

    def _by_rows(self, batch: Batch) -> bool:
        """Whether rows run one after the other: the decoder takes one at a time, or tokens that are verified would be
        among too many others."""
        verifies = any(row.kind is Kind.VERIFY and len(row.tokens) > 1 for row in batch.rows)
        return not self.decoder.rows_together or (verifies and len(batch.tokens) > self._verified_at_once)

    @property
    def _verified_at_once(self) -> int:
        """Tokens of a pass in which each gets the bits that it gets alone."""
        return min(FEW_TOKENS, self.chunk) if self.decoder.verifies else 1

    def _in_parts(self, row: Row, cache: Any, every: bool) -> Tensor:
        size, tokens = self._verified_at_once, row.tokens
        parts = [Row(row.slab, row.first + at, tokens[at : at + size], row.kind) for at in range(0, len(tokens), size)]
        logits = [self._pass(Batch((part,)), cache, every) for part in parts]
        return torch.cat(logits) if every else logits[-1]

    def _in_chunks(self, batch: Batch, cache: Any, every: bool) -> Tensor:
        found: dict[int, list[Tensor]] = {row.slab: [] for row in batch.rows}
        for chunk in batch.chunks(self.chunk):
            logits = self._pass(chunk, cache, every)
            sizes = [len(row.tokens) if every else 1 for row in chunk.rows]
            for row, its in zip(chunk.rows, torch.split(logits, sizes), strict=True):
                found[row.slab] = [*found[row.slab], its] if every else [its]
        return torch.cat([each for row in batch.rows for each in found[row.slab]])

    def _pass(self, batch: Batch, cache: Any, every: bool) -> Tensor:
        self._current.begin(batch)
        if self.confident is not None and batch.phase == "decode" and not every:
            return self.confident.decode(lambda: self.decoder.step(batch, cache), lambda logits: logits)
        return self.decoder.step(batch, cache, every)


def is_finite(logits: Tensor) -> bool:
    """Whether the largest is finite: NaN is larger than any to torch, and a model may rule tokens out by -inf."""
    return math.isfinite(logits.max())


def not_finite(where: str = "") -> ModelError:
    """The error for logits that are not; where: the first layer whose values are not."""
    found = f"; the first values that are not come from {where}" if where else ""
    return ModelError(
        f"the model's logits are not finite numbers{found}. Its weights are damaged, or its config is another's: "
        f"'tiermoe show STORE --verify' finds damage in a store; else download the checkpoint again"
    )
