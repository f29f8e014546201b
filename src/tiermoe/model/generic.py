"""Families without a decoder of their own: transformers' modelling code, with nothing but its experts replaced."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from tiermoe.batch import Batch
from tiermoe.errors import PromptError
from tiermoe.model.linear import PackedLinear
from tiermoe.types import Need, Phase, Workload


def needs(config: Any, load: Workload, latent: bool, eager: bool) -> list[Need]:
    """What transformers' growing cache and its attention take: keys and values of `context` tokens in all layers, and
    the copy of one layer's that is made while it grows. latent: a compressed cache, of which one layer at a time is
    expanded. eager: attention holds the scores of all heads."""
    heads, kv_heads, head_dim = attention_shape(config)
    tokens, context = load.tokens, load.context
    at_once = load.sequences * context if getattr(config, "is_encoder_decoder", False) else tokens
    scores = at_once * context * (heads * (2 * load.itemsize + 8) if eager or latent else 5)
    repeated = 2 * load.sequences * context * heads * head_dim * load.itemsize if kv_heads < heads else 0
    return [
        Need("kv cache", _cache_bytes(config, load, latent), Phase.RUNNING, f"{context} tokens of context"),
        Need("activations", scores + repeated, Phase.RUNNING, "attention"),
    ]


def _cache_bytes(config: Any, load: Workload, latent: bool) -> int:
    heads, kv_heads, head_dim = attention_shape(config)
    expanded = 0
    if latent:
        per_token = int(config.kv_lora_rank + config.qk_rope_head_dim)
        expanded = int(heads * (2 * config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim))
    else:
        per_token = 2 * kv_heads * head_dim
    positions = _positions(config, load.context, load.chunk)
    each = per_token * (sum(positions) + 2 * max(positions)) + expanded * load.context
    return load.sequences * load.itemsize * each


def _positions(config: Any, context: int, chunk: int) -> list[int]:
    """How many positions each layer of the cache holds at the most."""
    layers = int(getattr(config, "num_decoder_layers", None) or config.num_hidden_layers)
    if getattr(config, "is_encoder_decoder", False):
        return [context] * (2 * layers)  # the decoder's own and the cross attention to the prompt
    windows = [
        layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else context
        for layer in DynamicCache(config=config).layers
    ]
    # a window is a view of all that was concatenated: the tokens before it stay until the next ones come
    held = [min(window - 1 + chunk, context) if window < context else context for window in windows]
    return held or [context] * layers


def attention_shape(config: Any) -> tuple[int, int, int]:
    """(heads, key/value heads, size of a head) of a config, whatever its family calls them."""
    heads = int(getattr(config, "num_attention_heads", 0) or config.num_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    hidden = int(getattr(config, "hidden_size", 0) or config.d_model)
    head_dim = int(getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or hidden // heads)
    return heads, kv_heads, head_dim


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

    def time_linears(self, note: Callable[[float], None]) -> Callable[[], None]:
        """Calls `note` with the seconds of each call of a linear layer; returns what ends it."""
        began = 0.0

        def before(*_: Any) -> None:
            nonlocal began
            began = time.perf_counter()

        def after(*_: Any) -> None:
            note(time.perf_counter() - began)

        linears = [each for each in self.model.modules() if isinstance(each, torch.nn.Linear | PackedLinear)]
        handles = [each.register_forward_pre_hook(before) for each in linears]
        handles += [each.register_forward_hook(after) for each in linears]

        def undo() -> None:
            for handle in handles:
                handle.remove()

        return undo

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
