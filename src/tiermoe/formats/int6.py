"""6 bits: a code for each weight and a scale for each group of a row.

Blocks of 64 rows. Within a block four columns after each other fill 192 bytes, one run for whoever reads a block. First
come the low four bits, 32 bytes a column, byte j with rows j (low nibble) and 32 + j (high nibble): the order of 4-bit
codes. Then the high two bits, 32 bytes for columns 0 and 1 and 32 for columns 2 and 3. From its lowest bits up, byte j
holds those of row 32 + j and of row j in the first column, then of row 32 + j and of row j in the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tiermoe import native
from tiermoe.formats.encoding import BLOCK_ROWS, ORDER, Encoded, EncodedInC, Field, InC, RowBlocks, scratch
from tiermoe.formats.quantizers import Quantizer, require_finite

COLUMNS = 4  # a matrix has a multiple of them
MIDDLE = 32
BLOCK_WEIGHTS = 1 << 18  # weights rounded at a time: bounds the float32 temporaries

_HALF = BLOCK_ROWS // 2
_LOW = COLUMNS * _HALF  # bytes
_RUN = _LOW + COLUMNS * BLOCK_ROWS // 4  # bytes of four columns of a block
_PLACES = ((0, 0, 2), (0, 1, 0), (1, 0, 6), (1, 1, 4))  # column of a pair, half of the rows, where its two bits begin


@dataclass(frozen=True)
class Int6(RowBlocks, EncodedInC):
    """6 bits: w = (code - 32) * scale.

    Fields: `codes` uint8 (N, 3 K / 4), `scales` (N, K / group), in each block of 64 rows as (K / group, 64). A group's
    scale gives its largest magnitude the code 0 or 63, whichever leaves the smaller sum of squared errors, whatever
    `quantizer` is; so a scale may be negative."""

    group: int
    bits: ClassVar[int] = 6

    @property
    def name(self) -> str:
        return f"int6/{ORDER}/g{self.group}"

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return Field("codes", torch.uint8, (out, in_ * 3 // 4)), Field("scales", dtype, (out, in_ // self.group))

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        rows, columns = weight.shape
        codes = torch.empty((rows, columns), dtype=torch.uint8)
        scale = torch.empty((rows, columns // self.group))
        step = max(1, BLOCK_WEIGHTS // columns)
        for first in range(0, rows, step):
            part = slice(first, first + step)
            groups = weight[part].float().reshape(-1, columns // self.group, self.group)
            found, scale[part] = _nearest(groups, dtype)
            codes[part] = found.flatten(1)
        require_finite(scale)
        return {"codes": pack(codes), "scales": by_block(scale.to(dtype))}

    def encode_in_c(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> Encoded:
        rows, columns = weight.shape
        codes = scratch.take("packed codes", (rows, columns * 3 // 4), torch.uint8)
        scale = torch.empty(rows, columns // self.group)
        squares = native.encode("INT6", weight, self.group, dtype, scale, None, codes)
        require_finite(scale)
        return {"codes": codes, "scales": by_block(scale.to(dtype))}, squares

    def decode_rows(
        self, slot: Mapping[str, Tensor], first: int, last: int, in_: int, dtype: torch.dtype, into: Tensor
    ) -> Tensor:
        rows, groups = last - first, in_ // self.group
        codes = scratch.take("codes", (in_, rows), torch.uint8)
        unpack_transposed(slot["codes"][first:last], codes)
        weight = into.view(groups, self.group, rows)
        weight.copy_(codes.sub_(MIDDLE).view(torch.int8).view_as(weight))
        blocks = slot["scales"][first:last].view(-1, groups, BLOCK_ROWS)
        # one rounding where the scales are of this dtype: codes are exact in it
        weight.mul_(blocks.movedim(1, 0).reshape(groups, 1, rows).to(dtype))
        return weight.view(in_, rows).t()

    def in_c(self, out: int, in_: int) -> InC | None:
        return InC("INT6", self.group, "codes", "scales")


def _nearest(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes uint8 (rows, groups, group) and scales float32 (rows, groups), as `dtype` rounds them, of float32 weights
    (rows, groups, group)."""
    low, high = groups.aminmax(dim=-1)
    largest = torch.where(-low > high, low, high)
    found = [_rounded(groups, (largest / code).to(dtype).float()) for code in (-MIDDLE, MIDDLE - 1)]
    (codes, scale, error), (other_codes, other_scale, other_error) = found
    better = other_error < error
    codes = torch.where(better[..., None], other_codes, codes)
    return codes.add_(MIDDLE).to(torch.uint8), torch.where(better, other_scale, scale)


def _rounded(groups: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The codes less 32 that are nearest under a scale, the scale, and the sums of squared errors."""
    codes = torch.div(groups, torch.where(scale == 0, torch.inf, scale)[..., None])
    codes.round_().clamp_(-MIDDLE, MIDDLE - 1)
    return codes, scale, torch.mul(codes, scale[..., None]).sub_(groups).square_().sum(-1)


def by_block(scale: Tensor) -> Tensor:
    """Scales (N, G) in the order in which they are stored."""
    blocks = scale.view(-1, BLOCK_ROWS, scale.shape[1])
    return blocks.transpose(1, 2).contiguous().view_as(scale)


def pack(codes: Tensor) -> Tensor:
    """Codes 0..63, uint8 (N, K), in the order above: uint8 (N, 3 K / 4)."""
    rows, columns = codes.shape
    packed = torch.empty((rows, columns * 3 // 4), dtype=torch.uint8)
    low, high = _planes(packed)
    low.zero_()
    high.zero_()
    # (block, four columns, pair of them, column of it, half of the rows, row of it)
    source = codes.view(-1, 2, _HALF, columns // COLUMNS, 2, 2).permute(0, 3, 4, 5, 1, 2)
    for column, half, at in _PLACES:
        some = source[:, :, :, column, half]
        low[:, :, :, column] |= (some & 15) << 4 * half
        high |= some >> 4 << at
    return packed


def unpack_transposed(packed: Tensor, codes: Tensor) -> Tensor:
    """The codes of whole blocks of rows, packed (N, 3 K / 4), written into uint8 (K, N); returns that."""
    low, high = _planes(packed)
    # as in `pack`, but for the order of the dimensions
    target = codes.view(low.shape[1], 2, 2, low.shape[0], 2, _HALF)
    for column, half, at in _PLACES:
        bits = (high << 4 - at if at < 4 else high >> at - 4) & 0x30
        target[:, :, column, :, half].copy_((low[:, :, :, column] >> 4 * half & 15 | bits).permute(1, 2, 0, 3))
    return codes


def _planes(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the low bits (block, four columns, pair of them, column of it, 32) and of the high ones (block, four
    columns, pair of them, 32)."""
    runs = packed.view(len(packed) // BLOCK_ROWS, -1, _RUN)
    low, high = runs[..., :_LOW], runs[..., _LOW:]
    return low.view(*low.shape[:2], 2, 2, _HALF), high.view(*high.shape[:2], 2, _HALF)
