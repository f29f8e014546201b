"""Attention with queries in groups that share keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.kernels.native.few_tokens_attention import few_tokens_workspace
from tiermoe.kernels.native.prompt_attention import prompt_attention, prompt_workspace, takes_prompts
from tiermoe.model.kv_cache import KVCache, LayerShape
from tiermoe.model.linear import Linear
from tiermoe.model.norms import Norm
from tiermoe.model.rotary import Turn
from tiermoe.model.step import Span, Step, read, write
from tiermoe.types import FEW_TOKENS, Workload

_SCORES = 1 << 22  # scores that are held at once where torch has no kernel that holds none
_FLOAT_BYTES = 4
_SCORE_BYTES = 20  # of each, with sinks: in the model's dtype four times, as float32 twice, and masks; measured


@dataclass(frozen=True, slots=True)
class GroupedSizes:
    """What a `GroupedAttention` asks memory for, known from a config."""

    heads: int
    kv_heads: int
    columns: int
    window: int | None = None
    sinks: bool = False
    gated: bool = False
    rotary: int = 0
    """Which of a decoder's rotary embeddings turns it."""
    in_one_call: bool = True
    """Whether the native kernel could compute it with what surrounds it, for few tokens."""

    @property
    def shape(self) -> LayerShape:
        return LayerShape(self.kv_heads, self.columns, self.columns, self.window)

    @property
    def token_columns(self) -> int:
        """Columns of a token's queries, and of their gates."""
        return self.heads * self.columns * (2 if self.gated else 1)

    @property
    def rotary_columns(self) -> int:
        """Columns of a head that are turned, at the most."""
        return self.columns

    def prompt_bytes(self, load: Workload, dtype: torch.dtype) -> int:
        """Of one sequence's attention, beside queries, keys and values: the kernel's workspace. Without the kernel
        masks, scores where there are sinks, and copies: of a window in order, of keys and values of codes."""
        if takes_prompts(dtype, self.columns, self.columns):
            return prompt_workspace(load.threads, self.columns, self.columns)
        tokens = min(load.chunk, load.context)
        masks = tokens * load.context * (3 + load.itemsize)
        scores = scores_at_once(self.heads, tokens, load.context) * _SCORE_BYTES if self.sinks else 0
        room = self.shape.room(load.context, tokens)
        unrolled = 2 * room * self.shape.row_bytes(load.itemsize) if room < load.context else 0
        decoded = room * self.shape.row_bytes(load.itemsize + _FLOAT_BYTES) if load.kv_bits == 8 else 0
        return masks + scores + unrolled + decoded

    def few_tokens_bytes(self, tokens: int, positions: int, threads: int, hidden: int) -> int:
        """Of the native kernel."""
        if not self.in_one_call:
            return 0
        gates = 2 * min(tokens, FEW_TOKENS) * self.heads * self.columns if self.gated else 0
        return gates + few_tokens_workspace(
            tokens, self.window or positions, threads, (self.heads, self.kv_heads, self.columns, self.columns),
            hidden, 0,
        )  # fmt: skip


def scores_at_once(heads: int, tokens: int, positions: int) -> int:
    """Scores that are held at a time: a few million, but of one token all heads', or of one head all tokens'."""
    return min(max(_SCORES, heads * positions, tokens * positions), heads * tokens * positions)


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Projections, norms of queries and keys (of a head, or of all heads together), rotary embedding, attention over a
    window or over all that came before, output projection.

    sinks (heads): logits that join each softmax and have no value (gpt-oss). clip: bound of the projections (OLMoE).
    gated: `query` gives each head a gate behind its query, by whose sigmoid what it attends to is multiplied
    (Qwen3-Next). value None: values are what `key` gives, before it is normed and turned; value_norm: of a head (Gemma
    4). rotary: which of the step's angles turn it."""

    query: Linear
    key: Linear
    value: Linear | None
    output: Linear
    heads: int
    kv_heads: int
    columns: int
    scale: float
    turn: Turn
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    norm_all_heads: bool = False
    window: int | None = None
    sinks: Tensor | None = None
    clip: float | None = None
    gated: bool = False
    value_norm: Norm | None = None
    rotary: int = 0

    @property
    def shape(self) -> LayerShape:
        return LayerShape(self.kv_heads, self.columns, self.columns, self.window)

    def __call__(self, x: Tensor, layer: int, step: Step) -> Tensor:
        """x (T, H), normed → (T, H). Writes the tokens' keys and values into the step's cache."""
        query, gates = self._gates(self.query(x))
        query = self._projected(query, self.heads, self.query_norm)
        keys = self.key(x)
        value = self._clipped(keys if self.value is None else self.value(x)).view(-1, self.kv_heads, self.columns)
        value = value if self.value_norm is None else self.value_norm(value)
        key = self._projected(keys, self.kv_heads, self.key_norm)
        cos, sin = step.angles[self.rotary]
        query, key = self.turn(query, cos, sin), self.turn(key, cos, sin)
        attended = torch.empty_like(query)
        for span in step.spans:
            write(step.cache, layer, span.row, key[span.begin : span.end], value[span.begin : span.end])
            attended[span.begin : span.end] = self._attended(query[span.begin : span.end], layer, span, step.cache)
        attended = attended.flatten(1)
        return self.output(attended if gates is None else attended * torch.sigmoid(gates))

    def _gates(self, projected: Tensor) -> tuple[Tensor, Tensor | None]:
        """The queries and the gates (T, heads * columns) of what `query` gives."""
        if not self.gated:
            return projected, None
        query, gates = projected.view(-1, self.heads, 2 * self.columns).chunk(2, dim=-1)
        return query.flatten(1), gates.flatten(1)

    def _attended(self, query: Tensor, layer: int, span: Span, cache: KVCache) -> Tensor:
        """A sequence's tokens over its cache, by the native kernel where there is one."""
        if takes_prompts(query.dtype, self.columns, self.columns):
            row = span.row
            return prompt_attention(
                query, cache.native(layer), row.slab, row.first, self.scale, self.window, self.sinks
            )
        keys, values = read(cache, layer, span.row, self.window)
        return attend(query, keys, values, self.scale, self.window, self.sinks)

    def _projected(self, projected: Tensor, heads: int, norm: Norm | None) -> Tensor:
        if norm is not None and self.norm_all_heads:
            projected = norm(projected)
        projected = self._clipped(projected).view(-1, heads, self.columns)
        return norm(projected) if norm is not None and not self.norm_all_heads else projected

    def _clipped(self, projected: Tensor) -> Tensor:
        return projected if self.clip is None else projected.clamp(-self.clip, self.clip)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """query (T, heads, columns) over keys and values (kv heads, n, columns) of which the last T are the tokens' own →
    (T, heads, value columns)."""
    mask = _mask(query.shape[0], keys.shape[1], window, query.device)
    if sinks is not None:
        return _with_sinks(query, keys, values, scale, mask, sinks)
    if keys.shape[-1] != values.shape[-1]:
        return _by_heads(query, keys, values, scale, mask)
    grouped = query.shape[1] != keys.shape[0]
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=None if mask is None or _is_triangle(query, keys, window) else mask,
        is_causal=mask is not None and _is_triangle(query, keys, window),
        scale=scale,
        enable_gqa=grouped,
    )
    return attended[0].transpose(0, 1)


def _by_heads(query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """A few heads at a time: values that are narrower than keys have no kernel in torch that holds no scores."""
    tokens, heads, _ = query.shape
    triangle = mask is not None and _is_triangle(query, keys, None)
    few = max(1, _SCORES // (tokens * keys.shape[1]))
    result = query.new_empty((tokens, heads, values.shape[-1]))
    for begin in range(0, heads, few):
        some = slice(begin, begin + few)
        attended = F.scaled_dot_product_attention(
            query[:, some].transpose(0, 1)[None],
            keys[None, some],
            values[None, some],
            attn_mask=None if triangle else mask,
            is_causal=triangle,
            scale=scale,
        )
        result[:, some] = attended[0].transpose(0, 1)
    return result


def _is_triangle(query: Tensor, keys: Tensor, window: int | None) -> bool:
    """Whether the mask is the one that `is_causal` stands for."""
    return query.shape[0] == keys.shape[1] and (window is None or window >= keys.shape[1])


def _mask(tokens: int, positions: int, window: int | None, device: torch.device) -> Tensor | None:
    """(T, n), true where a token attends; None where each attends to all."""
    if tokens == 1 and (window is None or positions <= window):
        return None
    own = torch.arange(positions - tokens, positions, device=device)[:, None]
    other = torch.arange(positions, device=device)[None]
    mask = other <= own
    return mask if window is None else mask & (other > own - window)


def _with_sinks(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, sinks: Tensor
) -> Tensor:
    """A few tokens at a time, so that the scores of all heads take little memory."""
    tokens, heads, _ = query.shape
    kv_heads, positions, _ = keys.shape
    group = heads // kv_heads
    few = max(1, _SCORES // (heads * positions))
    result = query.new_empty((tokens, heads, values.shape[-1]))
    for begin in range(0, tokens, few):
        some = query[begin : begin + few].view(-1, kv_heads, group, query.shape[-1]).permute(1, 2, 0, 3)
        count = some.shape[2]
        scores = torch.matmul(some.reshape(kv_heads, group * count, -1), keys.transpose(1, 2)) * scale
        scores = scores.view(heads, count, positions)
        if mask is not None:
            scores = scores.masked_fill(~mask[begin : begin + few], float("-inf"))
        sink = sinks.view(-1, 1, 1).to(scores.dtype).expand(heads, count, 1)
        probabilities = torch.softmax(torch.cat((scores, sink), -1), dim=-1, dtype=torch.float32)[..., :-1]
        weighed = torch.matmul(probabilities.to(values.dtype).view(kv_heads, group * count, positions), values).view(
            kv_heads, group, count, -1
        )
        result[begin : begin + few] = weighed.permute(2, 0, 1, 3).reshape(count, heads, -1)
    return result
