"""Attention of a decoder's layers: the interface of every kind, and attention by torch's operations.

A kind is described once, by sizes from the config: the block, the cache, the kernel's descriptor and the plan's bytes
follow from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.kernels.attention import FusedAttention
from tiermoe.model.cache.kv import LayerShape
from tiermoe.model.parts import Norm
from tiermoe.model.step import Step
from tiermoe.types import Workload

SCORES_AT_ONCE = 1 << 22
"""Scores that are held at a time where torch has no kernel that holds none."""

SINK_SCORE_BYTES = 20
"""Of each score if there are sinks: in the model's dtype four times, as float32 twice, and masks; measured."""


class PositionIndexer(Protocol):
    """Chooses what tokens attend to in a layer (`Step.choose`), of its normed hidden states x (T, H), before attention
    is called. batch_invariant: what it chooses for a token does not depend on the other tokens of a call."""

    @property
    def batch_invariant(self) -> bool: ...

    def __call__(self, x: Tensor, layer: int, step: Step) -> None: ...


class Attention(ABC):
    """Attention of a layer, or what stands in its place: mixes a token with earlier ones."""

    __slots__ = ()

    sizes: AttentionSizes

    @abstractmethod
    def __call__(self, x: Tensor, layer: int, step: Step) -> Tensor:
        """x (T, H), normed → (T, H). Leaves what the layer keeps of the tokens, or each sequence's state after them, in
        the step's cache."""

    @property
    def by_place(self) -> bool:
        """Whether it finds a step's only token by `Step.place`, so that its launches are those of every position."""
        return False

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's values do not depend on other sequences, nor on tokens that are verified with it, if no
        `fused` computes them."""
        return False

    @property
    def chunk_invariant(self) -> bool:
        """Whether they do not depend on how a prompt is cut into chunks either."""
        return False

    def fused(
        self, before: Norm | None, after: Norm | None, rotary_columns: int, multiplier: float
    ) -> FusedAttention | None:
        """The kernel of norm `before`, attention, residual and norm `after` in one call, or without norms of attention
        alone; None if there is none.
        rotary_columns: of the angles by which it rotates. multiplier: of what is added."""
        return None


class AttentionSizes(ABC):
    """The description of a layer's attention, from a config alone: what the block asks memory for."""

    __slots__ = ()

    rotary: int = 0
    """Which of a decoder's rotary embeddings rotates queries and keys."""

    @property
    @abstractmethod
    def shape(self) -> LayerShape:
        """What the layer keeps in the KV cache."""

    @property
    @abstractmethod
    def token_columns(self) -> int:
        """Columns of a token's queries, or of as much as it is projected to."""

    @property
    def rotated_columns(self) -> int:
        """The most columns of a head that are rotated."""
        return 0

    @property
    def expanding_bytes(self) -> int:
        """Of matrices that the native kernel makes of the layer's weights and keeps."""
        return 0

    @property
    def taps_bytes(self) -> int:
        """Of a convolution's weights in another form than the checkpoint's."""
        return 0

    @abstractmethod
    def prompt_bytes(self, load: Workload, dtype: torch.dtype) -> int:
        """Workspace of one sequence's prompt, beside `token_columns`."""

    def fused_bytes(self, load: Workload, hidden: int) -> int:
        """Workspace of the native kernel. hidden: columns of the widest input."""
        return 0


@dataclass(frozen=True, slots=True)
class NoAttention(AttentionSizes):
    """The description of a layer without attention, which keeps nothing (Nemotron-H)."""

    @property
    def shape(self) -> LayerShape:
        return LayerShape(0, 0, 0)

    @property
    def token_columns(self) -> int:
        return 0

    def prompt_bytes(self, load: Workload, dtype: torch.dtype) -> int:
        return 0


def tempered(query: Tensor, temperatures: Tensor | None) -> Tensor:
    """query (T, heads, columns) by the tokens' temperatures (T); None: 1."""
    return query if temperatures is None else (query * temperatures[:, None, None]).to(query.dtype)


def scores_at_once(heads: int, tokens: int, positions: int) -> int:
    """Scores in memory at a time: a few million, but of one token all heads', or of one head all tokens'."""
    return min(max(SCORES_AT_ONCE, heads * positions, tokens * positions), heads * tokens * positions)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    chosen: Tensor | None = None,
) -> Tensor:
    """query (T, heads, columns) over keys and values (kv heads, n, columns), the last T of which are the tokens' own →
    (T, heads, value columns). window: the last positions that a token attends to; None: all. sinks: float32
    (heads), logits that join each softmax and have no value."""
    mask = mask_of(query.shape[0], keys.shape[1], window, query.device) if chosen is None else chosen
    triangle = chosen is None and query.shape[0] == keys.shape[1] and (window is None or window >= keys.shape[1])
    if sinks is not None:
        return attend_with_sinks(query, keys, values, scale, mask, sinks)
    mask, group = None if triangle else mask, query.shape[1] // len(keys)
    if keys.shape[-1] != values.shape[-1]:
        return _by_heads(query, keys, values, scale, mask, triangle)
    if mask is not None and group > 1 and query.device.type != "cpu":  # else torch holds the scores on a GPU
        keys, values, group = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0), 1
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=triangle and len(query) > 1,
        scale=scale,
        enable_gqa=group > 1,
    )
    return attended[0].transpose(0, 1)


def _by_heads(query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, triangle: bool) -> Tensor:
    """`attend` a few heads at a time: torch has no kernel that holds no scores for values narrower than keys."""
    tokens, heads, _ = query.shape
    group = heads // len(keys)
    heads_at_once = max(1, SCORES_AT_ONCE // (tokens * keys.shape[1]))
    result = query.new_empty((tokens, heads, values.shape[-1]))
    for begin in range(0, heads, heads_at_once):
        some = slice(begin, begin + heads_at_once)
        own = some if group == 1 else torch.arange(heads, device=keys.device)[some] // group
        attended = F.scaled_dot_product_attention(
            query[:, some].transpose(0, 1)[None],
            keys[own][None],
            values[own][None],
            attn_mask=mask,
            is_causal=triangle and tokens > 1,
            scale=scale,
        )
        result[:, some] = attended[0].transpose(0, 1)
    return result


def mask_of(tokens: int, positions: int, window: int | None, device: torch.device) -> Tensor | None:
    """(T, n), true if one of the last T of n positions attends to another; None if each attends to all."""
    if tokens == 1 and (window is None or positions <= window):
        return None
    own = torch.arange(positions - tokens, positions, device=device)[:, None]
    other = torch.arange(positions, device=device)[None]
    mask = other <= own
    return mask if window is None else mask & (other > own - window)


def attend_with_sinks(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, sinks: Tensor
) -> Tensor:
    """`attend` with sinks and a mask (T, n), None: all, a few tokens at a time, so that the scores of all heads take
    little memory."""
    tokens, heads, _ = query.shape
    kv_heads, positions, _ = keys.shape
    group = heads // kv_heads
    tokens_at_once = max(1, SCORES_AT_ONCE // (heads * positions))
    result = query.new_empty((tokens, heads, values.shape[-1]))
    for begin in range(0, tokens, tokens_at_once):
        some = query[begin : begin + tokens_at_once].view(-1, kv_heads, group, query.shape[-1]).permute(1, 2, 0, 3)
        count = some.shape[2]
        scores = torch.matmul(some.reshape(kv_heads, group * count, -1), keys.transpose(1, 2)) * scale
        scores = scores.view(heads, count, positions)
        if mask is not None:
            scores = scores.masked_fill(~mask[begin : begin + tokens_at_once], float("-inf"))
        sink = sinks.view(-1, 1, 1).expand(heads, count, 1)
        probabilities = torch.softmax(torch.cat((scores, sink), -1), dim=-1, dtype=torch.float32)[..., :-1]
        weighed = torch.matmul(probabilities.to(values.dtype).view(kv_heads, group * count, positions), values).view(
            kv_heads, group, count, -1
        )
        result[begin : begin + tokens_at_once] = weighed.permute(2, 0, 1, 3).reshape(count, heads, -1)
    return result
