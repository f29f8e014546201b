"""What the attention kernels are told of a decoder layer: its matrices, norms and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tiermoe.kernels.native.matrix import matrix_form
from tiermoe.native import ROWS, _native
from tiermoe.quant.encoding import Encoding

HEAD_COLUMNS = 32  # a head has a multiple of them
LARGEST_HEAD = 256
NORM_COLUMNS = 16  # a norm is a multiple of them wide

KINDS = {"rms": 0, "rms_at_once": 1, "rms_centred": 2, "layer": 3}
"""Of norms; the order is that of native/norm_row.h."""


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
        if self.bias is not None and not plain(self.bias):
            return None
        return form.pack(self.fields) if form else None


@dataclass(frozen=True, slots=True)
class Norm:
    """weight bfloat16 (width). `rms` rounds before it multiplies with the weight, `rms_at_once` after, and
    `rms_centred` so too, by 1 + weight; `layer` subtracts the mean and may have a bias (width)."""

    weight: Tensor
    epsilon: float
    kind: Literal["rms", "rms_at_once", "rms_centred", "layer"] = "rms"
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Heads that share keys and values in groups: head h has those of head h // (heads / kv heads).

    query (heads * head_columns, H), key (kv heads * head_columns, H), value (kv heads * value_columns, H), output
    (H, heads * value_columns). The norms of queries and keys are as wide as a head or as all of them. The first
    rotary_columns of a head are rotated: columns i and rotary_columns / 2 + i, or, interleaved, 2 i and 2 i + 1, which
    the cache then holds as i and rotary_columns / 2 + i. A token attends to `window` positions, its own included; 0: to
    all. sinks bfloat16 (heads): a score without a value that joins a head's softmax. gated: `query` has for each head
    the rows of a query and behind them those of a gate, value_columns, by whose sigmoid what the head attends to is
    multiplied. The output is multiplied by residual_multiplier before the residual sum."""

    query: PackedMatrix
    key: PackedMatrix
    value: PackedMatrix
    output: PackedMatrix
    norm_before: Norm
    norm_after: Norm
    head_columns: int
    rotary_columns: int
    scale: float
    norm_query: Norm | None = None
    norm_key: Norm | None = None
    value_columns: int | None = None  # None: head_columns
    interleaved: bool = False
    window: int = 0
    sinks: Tensor | None = None
    gated: bool = False
    residual_multiplier: float = 1.0


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Keys and values of a latent of each position (DeepSeek-V2), and of a rotary key that all heads share.

    query (heads * (head_columns + rotary_columns), H), or (.., R) of the normed outputs of query_first (R, H); latent
    (latent_columns + rotary_columns, H); key_up (heads * latent_columns, head_columns): of each head the transpose of
    the matrix that makes keys of latents; value_up (heads * value_columns, latent_columns); output
    (H, heads * value_columns). The cache holds normed latents and rotated keys, these in halves also where interleaved
    (see `GroupedAttention`)."""

    query: PackedMatrix
    latent: PackedMatrix
    key_up: PackedMatrix
    value_up: PackedMatrix
    output: PackedMatrix
    norm_before: Norm
    norm_after: Norm
    norm_latent: Norm
    head_columns: int
    value_columns: int
    latent_columns: int
    rotary_columns: int
    scale: float
    query_first: PackedMatrix | None = None
    norm_query: Norm | None = None
    interleaved: bool = True
    residual_multiplier: float = 1.0


def pack_layer(weights: GroupedAttention | LatentAttention) -> bytes | None:
    """What the kernels are told of a layer; None where its shapes, encodings or this machine do not suit them. Valid as
    long as its tensors live."""
    return _latent(weights) if isinstance(weights, LatentAttention) else _grouped(weights)


def _grouped(weights: GroupedAttention) -> bytes | None:
    query, key, value, output = weights.query, weights.key, weights.value, weights.output
    head, hidden = weights.head_columns, output.out
    value_columns = weights.value_columns or head
    query_columns = head + (value_columns if weights.gated else 0)
    heads, kv_heads = query.out // query_columns, key.out // head
    shapes = [
        (query, heads * query_columns, hidden), (key, kv_heads * head, hidden),
        (value, kv_heads * value_columns, hidden), (output, hidden, heads * value_columns),
    ]  # fmt: skip
    if not kv_heads or heads % kv_heads or not _columns_suit(head, value_columns, weights.rotary_columns, head):
        return None
    widths = (head,) if weights.gated else (head, query.out)
    query_norm = weights.norm_query is None or weights.norm_query.weight.numel() in widths
    key_norm = weights.norm_key is None or weights.norm_key.weight.numel() in (head, key.out)
    if not query_norm or not key_norm or _any_layer_norm(weights.norm_query, weights.norm_key):
        return None
    sizes = (heads, kv_heads, head, value_columns, weights.rotary_columns, 0, weights.window)
    return _packed(weights, (query, key, value, output, None, None), shapes, weights.norm_key, weights.sinks, sizes)


def _latent(weights: LatentAttention) -> bytes | None:
    head, latent, rotary = weights.head_columns, weights.latent_columns, weights.rotary_columns
    first, hidden = weights.query_first, weights.output.out
    heads = weights.query.out // (head + rotary)
    shapes = [
        (weights.query, heads * (head + rotary), first.out if first else hidden),
        (weights.latent, latent + rotary, hidden), (weights.key_up, heads * latent, head),
        (weights.value_up, heads * weights.value_columns, latent),
        (weights.output, hidden, heads * weights.value_columns),
    ]  # fmt: skip
    if first:
        shapes.append((first, first.out, hidden))
    if (first is None) != (weights.norm_query is None) or latent % 64 or weights.value_columns % 64:
        return None
    if weights.key_up.bias is not None or weights.value_up.bias is not None:
        return None
    if not _columns_suit(head, weights.value_columns, rotary, rotary) or rotary % HEAD_COLUMNS:
        return None
    projections = (weights.query, weights.latent, weights.value_up, weights.output, first, weights.key_up)
    sizes = (heads, 1, head, weights.value_columns, rotary, latent, 0)
    return _packed(weights, projections, shapes, weights.norm_latent, None, sizes)


def _packed(
    weights: GroupedAttention | LatentAttention,
    projections: tuple[
        PackedMatrix, PackedMatrix, PackedMatrix, PackedMatrix, PackedMatrix | None, PackedMatrix | None
    ],
    shapes: list[tuple[PackedMatrix, int, int]],
    norm_key: Norm | None,
    sinks: Tensor | None,
    sizes: tuple[int, int, int, int, int, int, int],
) -> bytes | None:
    norms = (weights.norm_before, weights.norm_after, weights.norm_query, norm_key)
    if any((matrix.out, matrix.in_) != (out, in_) or out % ROWS for matrix, out, in_ in shapes):
        return None
    if any(norm is not None and not _suits(norm) for norm in norms) or (sinks is not None and not plain(sinks)):
        return None
    packed = [None if matrix is None else matrix.pack() for matrix in projections]
    if any((matrix is None) != (each is None) for matrix, each in zip(projections, packed, strict=True)):
        return None
    told = tuple(
        None if matrix is None or each is None else (each, address(matrix.bias))
        for matrix, each in zip(projections, packed, strict=True)
    )
    gated = isinstance(weights, GroupedAttention) and weights.gated
    return _native.attention(
        told, tuple(None if norm is None else _told(norm) for norm in norms), address(sinks), *sizes, gated,
        weights.interleaved, weights.scale, weights.residual_multiplier,
    )  # fmt: skip


def _told(norm: Norm) -> tuple[int, int, int, float, int]:
    return norm.weight.data_ptr(), address(norm.bias), norm.weight.numel(), norm.epsilon, KINDS[norm.kind]


def _columns_suit(head: int, value: int, rotary: int, most_rotary: int) -> bool:
    fits = all(columns and columns % HEAD_COLUMNS == 0 and columns <= LARGEST_HEAD for columns in (head, value))
    return fits and 0 < rotary <= most_rotary and rotary % 2 == 0


def _any_layer_norm(*norms: Norm | None) -> bool:
    return any(norm is not None and norm.kind == "layer" for norm in norms)


def _suits(norm: Norm) -> bool:
    if norm.weight.ndim != 1 or norm.weight.numel() % NORM_COLUMNS or not plain(norm.weight):
        return False
    return norm.bias is None or (norm.kind == "layer" and plain(norm.bias) and norm.bias.shape == norm.weight.shape)


def plain(tensor: Tensor) -> bool:
    """Whether the kernels take a tensor by its address."""
    return tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and tensor.device.type == "cpu"


def address(tensor: Tensor | None) -> int:
    """Where a tensor lies; 0: nowhere."""
    return 0 if tensor is None else tensor.data_ptr()
