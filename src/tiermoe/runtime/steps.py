"""Running batches: the one way into a model, for prompts and generated tokens, our own loops and transformers'."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor

from tiermoe.batch import Batch, Kind, Row
from tiermoe.model.face import Face, SlabCache, takes_own_cache
from tiermoe.runtime.fallback import ConfidentDecoding, SavedCache
from tiermoe.runtime.passes import CurrentPass, given_tokens, past_tokens
from tiermoe.types import FEW_TOKENS


class SequenceCache(Protocol):
    """Keys and values of sequences, in slabs (`model.kv_cache.KVCache`, `model.generic.GenericCache`)."""

    def open(self) -> int: ...

    def close(self, slab: int) -> None: ...

    def length(self, slab: int) -> int: ...

    def crop(self, slab: int, length: int) -> None: ...

    def fork(self, slab: int) -> int: ...


class AnyDecoder(Protocol):
    """Computes batches (`model.decoder.Decoder`, `model.generic.GenericDecoder`).

    rows_together: several rows in one step. verifies: tokens that are verified together get the bits that each gets
    alone."""

    @property
    def rows_together(self) -> bool: ...

    @property
    def verifies(self) -> bool: ...

    def new_cache(self, slabs: int, context: int, step: int) -> SequenceCache: ...

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
        rows (T, vocabulary). Prompts run in chunks."""
        if len(batch.rows) > 1 and self._by_rows(batch):
            return torch.cat([self.step(Batch((row,)), cache, every) for row in batch.rows])
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


class Front:
    """What a transformers model with an engine does when it is called: a step where the decoder answers, else the code
    of its own class, whose passes are told apart by their lengths.

    own: the decoder is one of ours. base: the class whose code runs otherwise."""

    def __init__(self, steps: Steps, current: CurrentPass, base: Any, own: bool, use_cache: bool) -> None:
        self._steps = steps
        self._current = current
        self._base = base
        self._parameters = [name for name in inspect.signature(base.forward).parameters if name != "self"]
        self._face = Face(self._parameters, use_cache, steps.new_cache) if own else None

    def forward(self, model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """transformers' output object."""
        asked = self._face.asked(arguments, named) if self._face is not None else None
        if asked is not None and self._face is not None:
            asked.cache.kv.reserve(max(row.end for row in asked.batch.rows))
            logits = self._steps.step(asked.batch, asked.cache.kv, every=asked.keep != 1)
            return self._face.answer(asked, logits)
        return self._by_transformers(model, arguments, named)

    def cache_for_generate(self, generation_config: Any, model_kwargs: dict[str, Any]) -> SlabCache | None:
        """The cache that `generate()` begins with; None: one of transformers'."""
        if self._face is None or not takes_own_cache(generation_config, model_kwargs):
            return None
        return self._face.new_cache()

    def _by_transformers(self, model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if model.config.is_encoder_decoder:
            return self._base.forward(model, *arguments, **named)
        given = {**dict(zip(self._parameters, arguments, strict=False)), **named}
        ids, rows, length = given_tokens((), given)
        cache = given.get("past_key_values")
        if ids is not None and cache is not None and length > self._steps.chunk:
            return self._in_chunks(model, given, ids, cache)
        self._current.begin_call(ids, rows, length, past_tokens(given), prompt=False)
        confident = self._steps.confident
        if confident is None or self._current.phase != "decode":
            return self._base.forward(model, **given)
        saved = SavedCache(cache)
        return confident.decode(lambda: self._base.forward(model, **given), lambda output: output.logits, saved.restore)

    def _in_chunks(self, model: Any, given: dict[str, Any], ids: Tensor, cache: Any) -> Any:
        """A prompt, some of it at a time. The last output has the logits of all."""
        past, length, chunk = past_tokens(given), ids.shape[1], self._steps.chunk
        keep = given.get("logits_to_keep") or 0
        kept: list[Tensor] = []
        for begin in range(0, length, chunk):
            end = min(begin + chunk, length)
            part = {**given, "input_ids": ids[:, begin:end], "logits_to_keep": min(keep, end - begin)}
            if given.get("attention_mask") is not None and given["attention_mask"].ndim == 2:
                part["attention_mask"] = given["attention_mask"][:, : past + end]
            if given.get("position_ids") is not None:
                part["position_ids"] = given["position_ids"][:, begin:end]
            self._current.begin_call(ids[:, begin:end], ids.shape[0], end - begin, past + begin, prompt=True)
            output = self._base.forward(model, **part)
            kept.append(output.logits)
        if keep != 1:
            output.logits = torch.cat(kept, dim=1)[:, -keep:]
        return output
