"""Generic decoder of families without a decoder of their own: transformers' modelling code, with nothing but its
experts replaced; and what its growing cache takes."""

from __future__ import annotations

import copy
import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from tiermoe.batch import Batch
from tiermoe.errors import PromptError
from tiermoe.model.decoder import require_finite
from tiermoe.model.hf.configs import cache_name, cache_of
from tiermoe.model.parts import PackedLinear
from tiermoe.types import Need, Phase, Workload

_EXPANDED = {"qk_nope_head_dim": 2, "qk_rope_head_dim": 1, "v_head_dim": 1}
"""Columns of a head that are made of a latent, and how many times they are there."""


class GenericCache:
    """The cache that a transformers model makes for each sequence, with the methods of `KVCache` that a step's callers
    need. caches: slab → transformers' cache, None before the first tokens."""

    def __init__(self, slabs: int, context: int, can_rollback: bool) -> None:
        self.slabs, self.context = slabs, context
        self._can_rollback = can_rollback
        self._free = list(reversed(range(slabs)))
        self._length: dict[int, int] = {}
        self._nbytes: dict[int, int] = {}
        self.caches: dict[int, Any] = {}

    def open(self) -> int:
        """A slab for another sequence, empty. PromptError if all are taken."""
        if not self._free:
            raise PromptError(f"all {self.slabs} sequences that memory is set aside for are in use; close one")
        slab = self._free.pop()
        self.caches[slab], self._length[slab], self._nbytes[slab] = None, 0, 0
        return slab

    def close(self, slab: int) -> None:
        """Gives a slab back."""
        del self.caches[slab], self._length[slab], self._nbytes[slab]
        self._free.append(slab)

    def length(self, slab: int) -> int:
        """Tokens of the sequence."""
        return self._length[slab]

    def reached(self, slab: int) -> int:
        """Tokens that the sequence holds: what is cut off leaves no memory behind."""
        return self._length[slab]

    def kept(self, slab: int, length: int) -> int:
        """How many of the sequence's first `length` tokens it can be cut to, at the most; where a sliding window has
        moved on past them, `crop` refuses them yet."""
        return length if self._can_rollback or length == self._length[slab] else 0

    def crop(self, slab: int, length: int) -> None:
        """Forgets the positions from `length` on. ValueError if a sliding window has moved on past them, or if a
        recurrent state holds them."""
        surplus = self._length[slab] - length
        if surplus < 0:
            raise ValueError(f"a sequence of {self._length[slab]} tokens cannot be cut to {length}")
        if not surplus:
            return
        if not length:
            self.caches[slab], self._length[slab], self._nbytes[slab] = None, 0, 0
            return
        if not self._can_rollback:
            raise ValueError(f"a recurrent state cannot be wound back to {length} positions")
        try:
            self.caches[slab].crop(-surplus)
        except RuntimeError as error:
            raise ValueError(f"a sliding window cannot be wound back to {length} positions") from error
        self._length[slab] = length

    def grew(self, slab: int, tokens: int, grown: Any) -> None:
        """So many more tokens of a sequence have run; `grown` is its cache from now on."""
        self.caches[slab] = grown
        self._length[slab] += tokens
        self._nbytes[slab] = _bytes_of(grown)

    def nbytes(self, positions: int) -> int:
        """0: memory is planned for every slab's context."""
        return 0

    def nbytes_held(self, slab: int) -> int:
        """Bytes that the sequence's last step left."""
        return self._nbytes.get(slab, 0)

    def fork(self, slab: int, length: int | None = None) -> int:
        """A new sequence that begins with all of this one's tokens, or the first `length`. ValueError as `crop`."""
        other = self.open()
        self.caches[other], self._length[other] = copy.deepcopy(self.caches[slab]), self._length[slab]
        self._nbytes[other] = self._nbytes[slab]
        if length is not None:
            try:
                self.crop(other, length)
            except ValueError:
                self.close(other)
                raise
        return other


def pieces(past: int, length: int, chunk: int, continues: bool) -> list[tuple[int, int]]:
    """Where the passes begin and end that read `length` tokens after `past` ones, at most `chunk` at a time. continues:
    several tokens can follow others in one pass; else they follow one by one."""
    ends = [0]
    while ends[-1] < length:
        step = chunk if continues or not past + ends[-1] else 1
        ends.append(min(ends[-1] + step, length))
    return list(itertools.pairwise(ends))


class GenericDecoder:
    """Steps by a transformers model, one row at a time. forward: its class's own forward, with keyword arguments.
    continues: of `pieces`. numbered: tokens are given their positions, which a model that reads pictures too would
    count from what it read last."""

    rows_together = False
    chunk_invariant = False
    can_verify_draft = False

    def __init__(self, model: Any, forward: Callable[..., Any], continues: bool = True, numbered: bool = False) -> None:
        self.model = model
        self._continues, self._numbered = continues, numbered
        self.can_rollback = can_rollback(model.config)
        self._forward = forward
        self._cache_name = cache_name(inspect.signature(type(model).forward).parameters)

    def new_cache(self, slabs: int, context: int, step: int) -> GenericCache:
        """A cache for `slabs` sequences of up to `context` tokens."""
        return GenericCache(slabs, context, self.can_rollback)

    def require_finite(self) -> Callable[[], None]:
        """Layers raise NotFiniteError if they give what is not finite, until the result is called."""
        handles = []
        for name, layers in self.model.named_modules():
            if isinstance(layers, torch.nn.ModuleList):
                handles += [
                    layer.register_forward_hook(partial(_require_finite_output, f"{name}.{index}"))
                    for index, layer in enumerate(layers)
                ]
        return partial(_remove, handles)

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
        return partial(_remove, handles)

    @torch.no_grad()
    def step(self, batch: Batch, cache: GenericCache, every: bool = False) -> Tensor:
        """The logits (1, vocabulary) of a row's last token, or of all its tokens (T, vocabulary)."""
        (row,) = batch.rows
        if cache.length(row.slab) != row.first:
            cache.crop(row.slab, row.first)
        ends = pieces(row.first, len(row.tokens), len(row.tokens), self._continues)
        logits = [self._run(row.slab, row.tokens[begin:end], cache, every) for begin, end in ends]
        return torch.cat(logits) if every else logits[-1]

    def _run(self, slab: int, tokens: tuple[int, ...], cache: GenericCache, every: bool) -> Tensor:
        past = cache.length(slab)
        named: dict[str, Any] = {self._cache_name: cache.caches[slab], "logits_to_keep": 0 if every else 1}
        if self._numbered:
            named["position_ids"] = torch.arange(past, past + len(tokens), device=self.model.device)[None]
        ids = torch.tensor([tokens], device=self.model.device)
        output = self._forward(input_ids=ids, use_cache=True, **named)
        cache.grew(slab, len(tokens), cache_of(output))
        logits: Tensor = output.logits[0]
        return logits if every else logits[-1:]  # Qwen3-Omni's class computes the logits of all tokens


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _require_finite_output(name: str, _: Any, __: Any, output: Any) -> None:
    first = output[0] if isinstance(output, tuple) else output
    if isinstance(first, Tensor):
        require_finite(name, first)


# what the cache takes


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Sizes of one layer's cache of one sequence."""

    fixed: int  # bytes whatever the length (convolutions, recurrent states)
    per_token: float  # more bytes for each token that it keeps
    window: int | None  # tokens that it keeps at the most; None: all

    def nbytes(self, context: int, chunk: int) -> int:
        """Bytes after `context` tokens. A window is a view of all that was concatenated: the tokens before it stay
        until the next ones come."""
        window = self.window
        tokens = min(window - 1 + chunk, context) if window is not None and window < context else context
        return int(self.fixed + self.per_token * tokens)


def needs(
    config: Any, load: Workload, latent: bool, eager: bool, grown: Sequence[LayerCache] | None = None
) -> list[Need]:
    """Memory of transformers' growing cache and of its attention: keys and values of `context` tokens in all layers,
    and the copy of one layer's that is made while it grows. latent: a compressed cache, of which one layer at a time is
    expanded. eager: attention holds the scores of all heads. grown: the layers of the model's own cache, as
    `measured_cache` found them; None: they follow from the config."""
    heads, kv_heads, head_dim = attention_shape(config)
    tokens, context = load.tokens, load.context
    scores = tokens * context * (heads * (2 * load.itemsize + 8) if eager or latent else 5)
    repeated = 2 * load.sequences * context * heads * head_dim * load.itemsize if kv_heads < heads else 0
    return [
        Need("kv cache", _cache_bytes(config, load, latent, grown), Phase.RUNNING, f"{context} tokens of context"),
        Need("activations", scores + repeated, Phase.RUNNING, "attention"),
    ]


def _cache_bytes(config: Any, load: Workload, latent: bool, grown: Sequence[LayerCache] | None) -> int:
    heads, kv_heads, head_dim = attention_shape(config)
    expanded = 0
    if latent:
        expanded = heads * sum(times * _widest(config, name) for name, times in _EXPANDED.items())
    if grown is not None:
        sizes = [layer.nbytes(load.context, load.chunk) for layer in grown]
        return load.sequences * (sum(sizes) + 2 * max(sizes, default=0) + expanded * load.context * load.itemsize)
    per_token = int(config.kv_lora_rank + config.qk_rope_head_dim) if latent else 2 * kv_heads * head_dim
    positions = _positions(config, load.context, load.chunk)
    each = per_token * (sum(positions) + 2 * max(positions)) + expanded * load.context
    return load.sequences * load.itemsize * each


def _positions(config: Any, context: int, chunk: int) -> list[int]:
    """Largest number of positions in each layer of the cache."""
    layers = int(getattr(config, "num_decoder_layers", None) or config.num_hidden_layers)
    if getattr(config, "is_encoder_decoder", False):
        return [context] * (2 * layers)  # the decoder's own and the cross attention to the prompt
    windows = [getattr(layer, "sliding_window", context) for layer in DynamicCache(config=config).layers]
    # a window is a view of all that was concatenated: the tokens before it stay until the next ones come
    positions = [min(window - 1 + chunk, context) if window < context else context for window in windows]
    return positions or [context] * layers


def attention_shape(config: Any) -> tuple[int, int, int]:
    """(heads, key/value heads, size of a head) of a config, whatever its family calls them; the most of its layers."""
    heads = int(_widest(config, "num_attention_heads") or config.num_heads)
    kv_heads = int(_widest(config, "num_key_value_heads") or heads)
    hidden = int(getattr(config, "hidden_size", 0) or config.d_model)
    head_dim = int(_widest(config, "head_dim") or getattr(config, "d_kv", None) or hidden // heads)
    return heads, kv_heads, head_dim


def _widest(config: Any, name: str) -> Any:
    """An entry of a config, the largest of its layers if they differ; None if there is none."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers does not choose among its layers
        return max(getattr(layer, name, None) or 0 for layer in config.per_layer_config)


def expands_latents(config: Any) -> bool:
    """Whether a config's attention makes keys and values of one latent a token."""
    return all(isinstance(_widest(config, name), int) for name in ("kv_lora_rank", *_EXPANDED))


def can_rollback(config: Any) -> bool:
    """Whether a model's cache can roll back the last tokens: recurrent states cannot."""
    layers = DynamicCache(config=config).layers
    return not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def measured_cache(model: Any, tokens: int) -> list[LayerCache] | None:
    """Sizes of each layer of a skeleton's cache, by forward passes on the meta device, which compute nothing; `tokens`
    are enough for layers that keep one of several. None if the model's code does not run there."""
    few, many = _cache_after(model, tokens), _cache_after(model, 2 * tokens)
    if few is None or many is None:
        return None
    found = []
    for (before, _), (after, window) in zip(few, many, strict=True):
        per_token = (after - before) / tokens
        found.append(LayerCache(round(before - per_token * tokens), per_token, window))
    return found


def _cache_after(model: Any, tokens: int) -> list[tuple[int, int | None]] | None:
    """(bytes, window) of each layer after so many tokens."""
    shells = [module for module in model.modules() if hasattr(module, "run_experts")]
    for shell in shells:
        shell.run_experts = lambda hidden, *_: torch.zeros_like(hidden)
    try:
        with torch.no_grad():
            ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
            cache = cache_of(model(input_ids=ids, use_cache=True))
    except (RuntimeError, NotImplementedError):
        return None
    finally:
        for shell in shells:
            del shell.run_experts
    layers = [(_nbytes(layer), getattr(layer, "sliding_window", None)) for layer in cache.layers]
    return layers + [(_linear_nbytes(each), None) for each in _linear(cache)]


def _bytes_of(cache: Any) -> int:
    """Bytes of a cache of transformers'."""
    return sum(map(_nbytes, getattr(cache, "layers", ()))) + sum(map(_linear_nbytes, _linear(cache)))


def _linear(cache: Any) -> Any:
    return getattr(cache, "linear_cache", ())


def _linear_nbytes(layer: Any) -> int:
    return sum(part.nbytes for part in tensors_in(layer))


def _nbytes(layer: Any) -> int:
    return sum(each.untyped_storage().nbytes() for each in tensors_in(vars(layer)))


def tensors_in(owner: Any) -> Iterator[Tensor]:
    """All tensors in a dict or a list, and in the objects in it that belong to a cache."""
    if isinstance(owner, Tensor):
        yield owner
    elif isinstance(owner, dict):
        for each in owner.values():
            yield from tensors_in(each)
    elif isinstance(owner, list | tuple):
        for each in owner:
            yield from tensors_in(each)
