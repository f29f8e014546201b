"""What a step is made of: the decoder and the cache that it runs over, and the passes that a batch is cut into."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tiermoe.batch import Batch, Kind, Row
from tiermoe.errors import ModelError
from tiermoe.platform.threads import torch_threads
from tiermoe.types import FEW_TOKENS


class SequenceCache(Protocol):
    """Keys and values of sequences, in slabs (`model.kv_cache.KVCache`, `model.hf.generic.GenericCache`)."""

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
    """Computes batches (`model.decoder.Decoder`, `model.hf.generic.GenericDecoder`).

    rows_together: several rows in one step. chunk_invariant: a token's bits depend on its sequence alone.
    can_verify_draft: tokens verified in one step get the bits that each gets alone. can_rollback: a sequence's last
    step can be taken back."""

    @property
    def rows_together(self) -> bool: ...

    @property
    def chunk_invariant(self) -> bool: ...

    @property
    def can_verify_draft(self) -> bool: ...

    @property
    def can_rollback(self) -> bool: ...

    def new_cache(self, slabs: int, context: int, step: int) -> SequenceCache: ...

    def require_finite(self) -> Callable[[], None]: ...

    def step(self, batch: Batch, cache: Any, every: bool = False) -> Tensor: ...


def passes_of(batch: Batch, decoder: AnyDecoder, chunk: int, together: int = 1) -> list[Batch]:
    """The passes that a step over a batch is made of, in their order. Prompts run `chunk` tokens at a time; of one
    prompt, `together` chunks go through a layer before the next layer. Where a decoder takes one row at a time, or
    cannot verify several tokens in a step with the bits that each has alone, rows or tokens run one after the other."""
    rows = batch.rows
    if len(rows) == 1 and rows[0].kind is Kind.DECODE:
        return [batch]
    if any(row.kind is Kind.VERIFY for row in rows) or len(rows) > 1:
        verified_at_once = min(FEW_TOKENS, chunk) if decoder.can_verify_draft else 1
        fits = not batch.verifies or len(batch.tokens) <= verified_at_once
        if len(rows) > 1 and not (decoder.rows_together and fits):
            return [each for row in rows for each in passes_of(Batch((row,)), decoder, chunk, together)]
        row = rows[0]
        if row.kind is Kind.VERIFY and len(row.tokens) > verified_at_once:
            starts = range(0, len(row.tokens), verified_at_once)
            parts = [(at, row.tokens[at : at + verified_at_once]) for at in starts]
            return [Batch((Row(row.slab, row.first + at, tokens, row.kind),)) for at, tokens in parts]
    if all(len(row.tokens) <= chunk for row in rows):
        return [batch]
    chunks = list(batch.chunks(chunk))
    if together == 1 or len(rows) > 1:
        return chunks
    in_order = [chunk.rows[0] for chunk in chunks]
    groups = [tuple(in_order[at : at + together]) for at in range(0, len(in_order), together)]
    return [Batch(group) for group in groups]


def gathered(passes: Sequence[Batch], logits: Sequence[Tensor], batch: Batch, every: bool) -> Tensor:
    """The logits of a batch's rows from those of its passes: (rows, vocabulary) of each row's last token, or of every
    token of all rows (T, vocabulary)."""
    found: dict[int, list[Tensor]] = {row.slab: [] for row in batch.rows}
    for each, of_pass in zip(passes, logits, strict=True):
        slabs = [row.slab for row in each.rows] if every else list(each.ends)
        sizes = [len(row.tokens) for row in each.rows] if every else [1] * len(slabs)
        for slab, of_row in zip(slabs, torch.split(of_pass, sizes), strict=True):
            found[slab] = [*found[slab], of_row] if every else [of_row]
    return torch.cat([each for row in batch.rows for each in found[row.slab]])


def is_finite(logits: Tensor) -> bool:
    """Whether the largest is finite: NaN is larger than any to torch, and a model may rule tokens out by -inf."""
    with torch_threads(1):
        return math.isfinite(logits.max())


def not_finite(where: str = "") -> ModelError:
    """The error for logits that are not; where: the first layer whose values are not."""
    found = f"; the first values that are not come from {where}" if where else ""
    return ModelError(
        f"the model's logits are not finite numbers{found}. Its weights are damaged, or its config is another's: "
        f"'tiermoe show STORE --verify' finds damage in a store; else download the checkpoint again"
    )
