"""4 bits whose 16 levels are not evenly spaced: near 0, where most weights lie, they are closer to each other.

A group of weights has one scale. It is searched for by the sum of squared errors: `CANDIDATES` from the group's largest
magnitude, then steps of least squares from the best of them. Natively where that is possible, else in torch, with the
same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tiermoe import native
from tiermoe.quant.encoding import Field, SameInSlot
from tiermoe.quant.quantized import Quantizer, require_finite
from tiermoe.quant.scratch import scratch

LEVELS = (-125, -93, -71, -54, -40, -27, -15, -3, 9, 21, 33, 46, 62, 79, 101, 127)
"""What the codes stand for, in units of the scale; those of `NL4_LEVELS` in native/matrix.h."""

BLOCK_ROWS = 64  # a matrix has a multiple of them
GROUP = 32
STEPS = 2  # of least squares
CANDIDATES = tuple(sign * (0.86 + 0.03 * step) / 127 for step in range(15) for sign in (1, -1))
"""Scales that are tried, in units of the group's largest magnitude."""

_HALF = BLOCK_ROWS // 2
_SCALES = BLOCK_ROWS * torch.bfloat16.itemsize  # bytes of a group of columns
BLOCK_WEIGHTS = 1 << 18  # weights searched at a time: bounds the float32 temporaries


@dataclass(frozen=True)
class Nl4(SameInSlot):
    """Field `blocks` uint8 (N, K / 2 + 2 K / group). Each block of 64 rows is one run of bytes: for each group of
    columns the rows' 64 scales in bfloat16, then for each column 32 bytes, byte j with the code of row j in its low and
    of row 32 + j in its high four bits.

    w = LEVELS[code] * scale, whatever the compute dtype; a scale may be negative. Scales and codes follow from the
    weights alone, whatever `quantizer` is; unless it has `scale` (N, K / group), for which weights are levels."""

    layout: str
    group: int
    bits: ClassVar[int] = 4

    @property
    def name(self) -> str:
        return f"nl4/{self.layout}/g{self.group}"

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (Field("blocks", torch.uint8, (out, in_ // 2 + in_ // self.group * torch.bfloat16.itemsize)),)

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        rows, columns = weight.shape
        (field,) = self.stored_fields(rows, columns, dtype)
        blocks = torch.empty(field.shape, dtype=torch.uint8)
        found: Tensor | None = getattr(quantizer, "scale", None)
        step = max(1, BLOCK_WEIGHTS // (columns * BLOCK_ROWS)) * BLOCK_ROWS
        for first in range(0, rows, step):
            part = slice(first, first + step)
            weights = weight[part].float().contiguous()
            require_finite(*weights.aminmax())
            if found is None and native.quantizes():
                native.nl4(weights, self.group, CANDIDATES, STEPS, blocks[part])
            else:
                _encode(weights, self.group, blocks[part], None if found is None else found[part])
        return {"blocks": blocks}

    def rows_apart(self, columns: int, quantizer: Quantizer) -> int | None:
        return BLOCK_ROWS

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        return self.decode_rows(slot, 0, out, in_, dtype, torch.empty(out * in_, dtype=dtype))

    def decode_rows(
        self, slot: Mapping[str, Tensor], first: int, last: int, in_: int, dtype: torch.dtype, into: Tensor
    ) -> Tensor:
        """The weights of rows first..last - 1, a whole number of blocks: a transposed view (last - first, in_) of
        `into`, a buffer of so many values of `dtype`."""
        rows, groups = last - first, in_ // self.group
        scales, codes = _parts(slot["blocks"][first:last], self.group)
        both = codes.permute(1, 2, 0, 3)  # (group, its column, block, byte)
        found = scratch.take("codes", (*both.shape[:3], 2, _HALF), torch.int32)
        found[..., 0, :].copy_(both).bitwise_and_(15)
        found[..., 1, :].copy_(both).bitwise_right_shift_(4)
        levels = torch.tensor(LEVELS, dtype=dtype, device=into.device)
        torch.index_select(levels, 0, found.flatten(), out=into)
        weight = into.view(groups, self.group, rows)
        # one rounding: levels are exact in every dtype, and the product is exact in float32
        weight.mul_(scales.view(torch.bfloat16).permute(1, 0, 2).reshape(groups, 1, rows))
        return weight.view(in_, rows).t()


def _parts(blocks: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Views of the scales' bytes (block, group, 128) and of the codes (block, group, its column, 32)."""
    runs = blocks.view(blocks.shape[0] // BLOCK_ROWS, -1, _SCALES + group * _HALF)
    codes = runs[..., _SCALES:]
    return runs[..., :_SCALES], codes.view(*codes.shape[:2], group, _HALF)


def _encode(weights: Tensor, group: int, blocks: Tensor, found: Tensor | None) -> None:
    """Fills the field of float32 weights (N, K), for the scales (N, G) that were found, or those of the search."""
    grouped = weights.view(len(weights), -1, group)
    scale = _searched(grouped) if found is None else found
    codes = _codes(grouped, scale).view(-1, 2, _HALF, *grouped.shape[1:]).permute(0, 3, 4, 1, 2)
    scales_at, codes_at = _parts(blocks, group)
    scales = scale.bfloat16().view(-1, BLOCK_ROWS, scale.shape[1]).transpose(1, 2)
    scales_at.copy_(scales.contiguous().view(torch.uint8))
    codes_at.copy_(codes[..., 0, :] | codes[..., 1, :] << 4)


def _searched(grouped: Tensor) -> Tensor:
    """The scale (N, G) of each group (N, G, group), as bfloat16 rounds it: the first of those with the least error."""
    largest = grouped.abs().amax(-1)
    best, least = torch.zeros_like(largest), torch.full_like(largest, torch.inf)

    def judge(scale: Tensor) -> None:
        nonlocal best, least
        scale = scale.bfloat16().float()
        error = _summed((_levels(grouped, scale) * scale[..., None] - grouped).square_())
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)

    for candidate in CANDIDATES:
        judge(largest * candidate)
    for _ in range(STEPS):
        levels = _levels(grouped, best)
        judge(_summed(levels * grouped) / _summed(levels.square_()))
    return best


def _codes(grouped: Tensor, scale: Tensor) -> Tensor:
    """The codes uint8 of the levels that are nearest under a scale, the lower one of two."""
    levels = torch.tensor(LEVELS, dtype=torch.float32)
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)
    between = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(grouped * inverse[..., None], between).to(torch.uint8)


def _levels(grouped: Tensor, scale: Tensor) -> Tensor:
    return torch.tensor(LEVELS, dtype=torch.float32)[_codes(grouped, scale).int()]


def _summed(values: Tensor) -> Tensor:
    """The sums over the last dimension, in its order: that of the native search."""
    total = values[..., 0].clone()
    for each in values.unbind(-1)[1:]:
        total += each
    return total
