"""The attention half of a decoder layer for one token of each of several sequences, all at one position of their
caches: what `runtime.one_token` asks of the kernel for few tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.kernels.native.attention import GroupedAttention, Norm, PackedMatrix
from tiermoe.kernels.native.few_tokens_attention import FewTokensAttention, Slabs, Step, few_tokens_attention


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Norm weights are bfloat16 (H) before and after the attention, (head) or (heads * head) of queries and keys, None
    where there is no such norm. All norms are root mean square norms with one epsilon."""

    query: PackedMatrix
    key: PackedMatrix
    value: PackedMatrix
    output: PackedMatrix
    norm_before: Tensor
    norm_after: Tensor
    norm_query: Tensor | None
    norm_key: Tensor | None
    epsilon: float
    scale: float
    head_columns: int


class OneTokenAttention:
    """One layer's. Keeps the weights alive."""

    def __init__(self, weights: AttentionWeights, kernel: FewTokensAttention) -> None:
        self.weights = weights
        self._kernel = kernel

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        length: int,
        first: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x (B, 1, H), cos and sin (B or 1, 1, head), all bfloat16 and contiguous; keys and values (B, kv heads, room,
        head): position `length` is written, positions first .. length are attended to. first: int64 (B), where padding
        on the left ends; None: 0.

        → (x + the attention's output, the norm of that), each (B, 1, H). A sequence's values do not depend on the
        others."""
        sequences, head = x.shape[0], self.weights.head_columns
        turns = [turn.view(-1, head) if len(turn) == sequences else turn[0].repeat(sequences, 1) for turn in (cos, sin)]
        step = Step(torch.arange(sequences), torch.full((sequences,), length), turns[0], turns[1], first)
        out, normed = self._kernel(x.view(sequences, -1), step, Slabs(keys, values))
        return out.view(x.shape), normed.view(x.shape)


def one_token_attention(weights: AttentionWeights) -> OneTokenAttention | None:
    """The kernel of a layer; None where its shapes, encodings or this machine do not suit it."""

    def norm(weight: Tensor) -> Norm:
        return Norm(weight, weights.epsilon)

    query, key = weights.norm_query, weights.norm_key
    if (query is None) != (key is None):
        return None
    kernel = few_tokens_attention(
        GroupedAttention(
            weights.query, weights.key, weights.value, weights.output, norm(weights.norm_before),
            norm(weights.norm_after), weights.head_columns, weights.head_columns, weights.scale,
            None if query is None else norm(query), None if key is None else norm(key),
        )
    )  # fmt: skip
    return None if kernel is None else OneTokenAttention(weights, kernel)
