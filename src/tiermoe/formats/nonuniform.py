"""4, 3 or 2 bits with non-uniform levels: closer to each other near 0, where most weights are.

A group of weights has one scale. The scale is searched for by the sum of squared errors: `candidates` from the group's
largest magnitude, then steps of least squares from the best of them. Natively where that is possible, else in torch,
with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe import native
from tiermoe.formats.encoding import BLOCK_ROWS, ORDER, Field, InC, RowBlocks, scratch
from tiermoe.formats.quantizers import Quantizer, require_finite

LEVELS = {
    4: (-125, -93, -71, -54, -40, -27, -15, -3, 9, 21, 33, 46, 62, 79, 101, 127),
    3: (-103, -62, -33, -7, 18, 45, 77, 127),
    2: (-97, -21, 44, 127),
}
"""What the codes of so many bits stand for, in units of the scale: those of `UNEVEN_LEVELS` in native/matrix.h. At 3
and 2 bits they fit normal weights in groups of 64 best, each group under the better sign of its scale."""

GROUPS = {4: (32,), 3: (64, 32), 2: (64, 32)}
"""Bits → columns that share a scale, in order of choice."""

STEPS = 2  # of least squares

_TRIED = {4: (0.86, 0.03), 3: (0.69, 0.03), 2: (0.35, 0.05)}  # from, and by what on
_HALF = BLOCK_ROWS // 2
_SCALES = BLOCK_ROWS * torch.bfloat16.itemsize  # bytes of a group of columns
BLOCK_WEIGHTS = 1 << 18  # weights searched at a time: bounds the float32 temporaries


def candidates(bits: int) -> tuple[float, ...]:
    """Scales that are tried, in units of the group's largest magnitude."""
    least, by = _TRIED[bits]
    return tuple(sign * (least + by * step) / 127 for step in range(15) for sign in (1, -1))


@dataclass(frozen=True)
class NonUniform(RowBlocks):
    """4, 3 or 2 bits: w = LEVELS[bits][code] * scale, whatever the compute dtype; a scale may be negative.

    Field: `blocks` uint8 (N, K bits / 8 + 2 K / group). Each block of 64 rows is one run of bytes: for each group of
    columns the rows' 64 scales in bfloat16, then the codes, of four columns after each other in as many planes of 32
    bytes as they have bits. Byte j of a plane has a nibble of row j in its low and of row 32 + j in its high four bits.
    4 bits: a plane is a column. 3 bits: a plane is one of the first three columns; the highest bits of the planes'
    nibbles are the code of the fourth column, its lowest bit in the first plane. 2 bits: a plane is two columns, the
    codes of the second above those of the first.

    Scales and codes follow from the weights alone, whatever `quantizer` is; but a quantizer with `scale` (N, K / group)
    has found the scales, and the weights are levels under them (`formats.gptq.Solved`)."""

    bits: int
    group: int

    @property
    def name(self) -> str:
        return f"nl{self.bits}/{ORDER}/g{self.group}"

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        size = in_ * self.bits // 8 + in_ // self.group * torch.bfloat16.itemsize
        return (Field("blocks", torch.uint8, (out, size)),)

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
                native.uneven(f"NL{self.bits}", weights, self.group, candidates(self.bits), STEPS, blocks[part])
            else:
                self._encode(weights, blocks[part], None if found is None else found[part])
        return {"blocks": blocks}

    def decode_rows(
        self, slot: Mapping[str, Tensor], first: int, last: int, in_: int, dtype: torch.dtype, into: Tensor
    ) -> Tensor:
        rows, groups = last - first, in_ // self.group
        scales, planes = self._parts(slot["blocks"][first:last])
        planes = planes.permute(3, 1, 2, 0, 4)  # (plane, group, its four columns, block, byte)
        found = scratch.take("codes", (groups, self.group // 4, 4, rows // BLOCK_ROWS, 2, _HALF), torch.int32)
        for column in range(4):
            both = self._column(planes, column)
            found[:, :, column, :, 0].copy_(both)
            found[:, :, column, :, 1].copy_(both >> 4)
        found.bitwise_and_((1 << self.bits) - 1)
        levels = torch.tensor(LEVELS[self.bits], dtype=dtype, device=into.device)
        torch.index_select(levels, 0, found.flatten(), out=into)
        weight = into.view(groups, self.group, rows)
        # one rounding: levels are exact in every dtype, and the product is exact in float32
        weight.mul_(scales.view(torch.bfloat16).permute(1, 0, 2).reshape(groups, 1, rows))
        return weight.view(in_, rows).t()

    def in_c(self, out: int, in_: int) -> InC | None:
        return InC(f"NL{self.bits}", self.group, "blocks")

    def _parts(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the scales' bytes (block, group, 128) and of the codes (block, group, its four columns, plane,
        32)."""
        runs = blocks.view(blocks.shape[0] // BLOCK_ROWS, -1, _SCALES + self.group * self.bits * BLOCK_ROWS // 8)
        codes = runs[..., _SCALES:]
        return runs[..., :_SCALES], codes.view(*codes.shape[:2], self.group // 4, self.bits, _HALF)

    def _column(self, planes: Tensor, column: int) -> Tensor:
        """The nibbles of one column of four, two a byte; bits above the codes belong to other columns. `planes`: first
        dimension."""
        if self.bits == 2:
            return planes[column // 2] >> column % 2 * 2
        if self.bits == 4 or column < 3:
            return planes[column]
        return planes[0] >> 3 & 0x11 | planes[1] >> 2 & 0x22 | planes[2] >> 1 & 0x44

    def _encode(self, weights: Tensor, blocks: Tensor, found: Tensor | None) -> None:
        """Fills the field of float32 weights (N, K), for the scales (N, G) that were found, or those of the search."""
        grouped = weights.view(len(weights), -1, self.group)
        scale = _searched(grouped, self.bits) if found is None else found
        groups = scale.shape[1]
        codes = _codes(grouped, scale, self.bits).view(-1, 2, _HALF, groups, self.group // 4, 4)
        both = codes[:, 0] | codes[:, 1] << 4  # (block, byte, group, its four columns, column)
        columns = both.permute(4, 0, 2, 3, 1)
        scales_at, planes = self._parts(blocks)
        scales = scale.bfloat16().view(-1, BLOCK_ROWS, groups).transpose(1, 2)
        scales_at.copy_(scales.contiguous().view(torch.uint8))
        for plane in range(self.bits):
            if self.bits == 2:
                planes[..., plane, :] = columns[2 * plane] | columns[2 * plane + 1] << 2
            elif self.bits == 3:
                planes[..., plane, :] = columns[plane] | (columns[3] >> plane & 0x11) << 3
            else:
                planes[..., plane, :] = columns[plane]


def _searched(grouped: Tensor, bits: int) -> Tensor:
    """The scale (N, G) of each group (N, G, group), as bfloat16 rounds it: the first of those with the least error."""
    largest = grouped.abs().amax(-1)
    best, least = torch.zeros_like(largest), torch.full_like(largest, torch.inf)

    def judge(scale: Tensor) -> None:
        nonlocal best, least
        scale = scale.bfloat16().float()
        error = _summed((_levels(grouped, scale, bits) * scale[..., None] - grouped).square_())
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)

    for candidate in candidates(bits):
        judge(largest * candidate)
    for _ in range(STEPS):
        levels = _levels(grouped, best, bits)
        judge(_summed(levels * grouped) / _summed(levels.square_()))
    return best


def _codes(grouped: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The codes, uint8, of the levels that are nearest under a scale; of two equally near ones the lower."""
    levels = torch.tensor(LEVELS[bits], dtype=torch.float32)
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)
    between = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(grouped * inverse[..., None], between).to(torch.uint8)


def _levels(grouped: Tensor, scale: Tensor, bits: int) -> Tensor:
    return torch.tensor(LEVELS[bits], dtype=torch.float32)[_codes(grouped, scale, bits).int()]


def _summed(values: Tensor) -> Tensor:
    """The sums over the last dimension, in its order: that of the native search."""
    total = values[..., 0].clone()
    for each in values.unbind(-1)[1:]:
        total += each
    return total
