"""Families without a decoder of their own: transformers' modelling code, with nothing but its experts replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from tiermoe.batch import Batch
from tiermoe.errors import PromptError


class GenericCache:
    """transformers' growing cache of each sequence, with the methods of `KVCache` that a step's callers need."""

    def __init__(self, config: Any, slabs: int, context: int) -> None:
        self.slabs, self.context = slabs, context
        self._config = config
        self._free = list(reversed(range(slabs)))
        self.held: dict[int, DynamicCache] = {}

    def open(self) -> int:
        """A slab for another sequence, empty. PromptError where all are taken."""
        if not self._free:
            raise PromptError(f"all {self.slabs} sequences that memory is set aside for are in use; close one")
        slab = self._free.pop()
        self.held[slab] = DynamicCache(config=self._config)
        return slab

    def close(self, slab: int) -> None:
        """Gives a slab back."""
        del self.held[slab]
        self._free.append(slab)

    def length(self, slab: int) -> int:
        """Tokens that the sequence holds."""
        return int(self.held[slab].get_seq_length())

    def crop(self, slab: int, length: int) -> None:
        """Forgets the positions from `length` on. ValueError where a sliding window has moved on past them."""
        surplus = self.length(slab) - length
        if surplus < 0:
            raise ValueError(f"a sequence of {self.length(slab)} tokens cannot be cut to {length}")
        if not surplus:
            return
        try:
            self.held[slab].crop(-surplus)
        except RuntimeError as error:
            raise ValueError(f"a sliding window cannot be wound back to {length} positions") from error

    def fork(self, slab: int) -> int:
        """A new sequence that begins with all of this one's tokens."""
        other = self.open()
        self.held[other] = copy.deepcopy(self.held[slab])
        return other


class GenericDecoder:
    """A step by a transformers model. forward: its class's own forward, with keyword arguments. Rows run one by one."""

    rows_together = False
    verifies = False

    def __init__(self, model: Any, forward: Callable[..., Any]) -> None:
        self.model = model
        self._forward = forward

    def new_cache(self, slabs: int, context: int, step: int) -> GenericCache:
        """A cache for `slabs` sequences of up to `context` tokens."""
        return GenericCache(self.model.config, slabs, context)

    @torch.no_grad()
    def step(self, batch: Batch, cache: GenericCache, every: bool = False) -> Tensor:
        """The logits (1, vocabulary) of a row's last token, or of all its tokens (T, vocabulary)."""
        (row,) = batch.rows
        held = cache.held[row.slab]
        if held.get_seq_length() != row.first:
            cache.crop(row.slab, row.first)
        output = self._forward(
            input_ids=torch.tensor([row.tokens], device=self.model.device),
            past_key_values=held,
            use_cache=True,
            logits_to_keep=0 if every else 1,
        )
        logits: Tensor = output.logits[0]
        return logits
