"""Rows of a matrix encoded by the native kernels: the bytes that the encodings' own `encode` gives, and how far they
are from the weights, without a temporary of the size of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tiermoe import native
from tiermoe.native import Coding
from tiermoe.quant import int6
from tiermoe.quant.encoding import Encoding
from tiermoe.quant.int2 import Int2
from tiermoe.quant.int4 import Int4
from tiermoe.quant.int6 import Int6
from tiermoe.quant.int8 import Int8
from tiermoe.quant.ladders import rows_together
from tiermoe.quant.quantized import Quantizer, levels, require_finite
from tiermoe.quant.quantizers import LinearQuantizer
from tiermoe.quant.scratch import scratch

Found = tuple[dict[str, Tensor], tuple[float, float]]
"""Stored fields, codes among them in scratch buffers that the thread's next call uses again; the sums of squares of the
difference and of the weights."""

_COLUMNS = 16  # a row has a multiple of them


def takes(encoding: Encoding, columns: int, weights: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether rows of so many columns are encoded natively, from weights of one dtype for kernels that compute in
    another."""
    known = type(encoding) in ENCODERS and columns % _COLUMNS == 0
    return known and weights in native.WEIGHTS and dtype in native.WEIGHTS and native.quantizes()


def encode(encoding: Encoding, quantizer: Quantizer, weight: Tensor, dtype: torch.dtype) -> Found:
    """Encodes rows that `takes` says yes to."""
    return ENCODERS[type(encoding)](encoding, quantizer, weight.contiguous(), dtype)


def _eight(encoding: Int8, quantizer: Quantizer, weight: Tensor, dtype: torch.dtype) -> Found:
    scale = LinearQuantizer.row_scale(weight, encoding.bits).to(dtype)
    codes = scratch.take("packed codes", tuple(weight.shape), torch.int8)
    squares = native.encode(Coding.INT8, weight, weight.shape[1], dtype, scale.float(), None, codes)
    return {"weight": codes, "scale": scale.view(-1)}, squares


def _six(encoding: Int6, quantizer: Quantizer, weight: Tensor, dtype: torch.dtype) -> Found:
    rows, columns = weight.shape
    codes = scratch.take("packed codes", (rows, columns * 3 // 4), torch.uint8)
    scale = torch.empty(rows, columns // encoding.group)
    squares = native.encode(Coding.INT6, weight, encoding.group, dtype, scale, None, codes)
    require_finite(scale)
    return {"codes": codes, "scales": int6.by_block(scale.to(dtype))}, squares


def _four(encoding: Int4, quantizer: Quantizer, weight: Tensor, dtype: torch.dtype) -> Found:
    rows, columns = weight.shape
    scale, zero = levels(weight, quantizer, encoding.group, dtype)
    codes = scratch.take("packed codes", (rows, columns // 2), torch.uint8)
    squares = native.encode(Coding.INT4, weight, encoding.group, dtype, scale.float(), zero.float(), codes)
    return {"codes": codes, "scales_and_zeros": _pairs(scale, zero)}, squares


def _two(encoding: Int2, quantizer: Quantizer, weight: Tensor, dtype: torch.dtype) -> Found:
    rows, columns = weight.shape
    grid = quantizer.grid(weight, encoding.group)
    scale, zero = grid.scale.to(dtype), grid.zero.to(dtype)
    codes = scratch.take("packed codes", (rows, columns // 4), torch.uint8)
    chosen = scratch.take("packed ladders", (rows, columns // 16), torch.uint8)
    ladders = bytes(number for ladder in grid.ladders for number in ladder)
    squares = native.encode(
        Coding.INT2, weight, encoding.group, dtype, scale.float(), zero.float(), codes, chosen, ladders,
        rows_together(columns),
    )  # fmt: skip
    return {"codes": codes, "ladders": chosen, "scales_and_zeros": _pairs(scale, zero)}, squares


def _pairs(scale: Tensor, zero: Tensor) -> Tensor:
    """As `Int4` stores them."""
    return torch.stack((scale.t(), zero.t()), dim=-1).contiguous()


ENCODERS: Mapping[type, Callable[[Any, Quantizer, Tensor, torch.dtype], Found]] = {
    Int8: _eight,
    Int6: _six,
    Int4: _four,
    Int2: _two,
}
"""Encodings whose rows the native kernels encode."""
