"""The attention half of a decoder layer for one token of each of several sequences in one call: norm, projections,
rotary embedding, attention over the key/value cache, output projection, residual, norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.kernels.native.matrix import matrix_form
from tiermoe.native import ROWS, _native
from tiermoe.quant.encoding import Encoding
from tiermoe.quant.scratch import scratch

HEAD_COLUMNS = 32  # a head has a multiple of them
LARGEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix (out, in_) in one of the encodings, whose slot fields are `fields`, and its bias (out), if any."""

    encoding: Encoding
    fields: Mapping[str, Tensor]
    out: int
    in_: int
    bias: Tensor | None = None

    def pack(self) -> bytes | None:
        """What the kernels are told of it; None where they do not take it."""
        form = matrix_form(self.encoding, self.out, self.in_, torch.bfloat16)
        if self.bias is not None and (self.bias.dtype != torch.bfloat16 or not self.bias.is_contiguous()):
            return None
        return form.pack(self.fields) if form else None


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

    def __init__(self, weights: AttentionWeights, packed: bytes) -> None:
        self.weights = weights
        self._packed = packed

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
        threads, sequences = torch.get_num_threads(), x.shape[0]
        out, normed = torch.empty_like(x), torch.empty_like(x)
        workspace = scratch.address("attention", _native.workspace(self._packed, sequences, length, threads))
        _native.attend(
            self._packed, workspace, sequences, x.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.shape[0] == 1,
            _address(first), keys.data_ptr(), values.data_ptr(), keys.shape[2], length, out.data_ptr(),
            normed.data_ptr(), threads,
        )  # fmt: skip
        return out, normed


def one_token_attention(weights: AttentionWeights) -> OneTokenAttention | None:
    """The kernel of a layer; None where its shapes, encodings or this machine do not suit it."""
    head = weights.head_columns
    query, key, value, output = (
        matrix.pack() for matrix in (weights.query, weights.key, weights.value, weights.output)
    )
    if query is None or key is None or value is None or output is None:
        return None
    if head % HEAD_COLUMNS or head > LARGEST_HEAD or not _norms_suit(weights) or not _shapes_suit(weights):
        return None
    packed = _native.attention(
        query, key, value, output,
        (
            _address(weights.query.bias), _address(weights.key.bias),
            _address(weights.value.bias), _address(weights.output.bias),
        ),
        _address(weights.norm_before), _address(weights.norm_after),
        _address(weights.norm_query), _address(weights.norm_key),
        0 if weights.norm_query is None else weights.norm_query.numel(),
        weights.query.out // head, weights.key.out // head, head, weights.epsilon, weights.scale,
    )  # fmt: skip
    return OneTokenAttention(weights, packed)


def _shapes_suit(weights: AttentionWeights) -> bool:
    inputs = weights.query, weights.key, weights.value
    # whole blocks of rows; the sums of the hidden state's groups are made once for all three
    if (
        any(matrix.out % ROWS for matrix in (*inputs, weights.output))
        or len({matrix.encoding for matrix in inputs}) > 1
    ):
        return False
    same = weights.value.out == weights.key.out and weights.output.in_ == weights.query.out
    return same and weights.output.out == weights.query.in_ and weights.query.out % weights.key.out == 0


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _norms_suit(weights: AttentionWeights) -> bool:
    query, key = weights.norm_query, weights.norm_key
    norms = [norm for norm in (weights.norm_before, weights.norm_after, query, key) if norm is not None]
    if any(norm.dtype != torch.bfloat16 or not norm.is_contiguous() or norm.numel() % 16 for norm in norms):
        return False
    if query is None or key is None:
        return query is None and key is None
    if query.numel() == key.numel() == weights.head_columns:
        return True
    return query.numel() == weights.query.out and key.numel() == weights.key.out
