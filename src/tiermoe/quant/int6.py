"""6 bits: codes in the order of `int6_layout`, and a scale for each group of a row."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tiermoe.quant import int6_layout
from tiermoe.quant.encoding import Field, SameInSlot
from tiermoe.quant.quantized import Quantizer, require_finite
from tiermoe.quant.scratch import scratch

MIDDLE = 32
BLOCK_WEIGHTS = 1 << 18  # weights rounded at a time: bounds the float32 temporaries


@dataclass(frozen=True)
class Int6(SameInSlot):
    """Fields `codes` uint8 (N, 3 K / 4) in the CPUs' order, and `scales` (N, K / group), in each block of 64 rows as
    (K / group, 64).

    w = (code - 32) * scale. A group's scale gives its largest magnitude the code 0 or 63, whichever leaves the smaller
    sum of squared errors, whatever `quantizer` is; so a scale may be negative."""

    layout: str
    group: int
    bits: ClassVar[int] = 6

    @property
    def name(self) -> str:
        return f"int6/{self.layout}/g{self.group}"

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
        return {"codes": int6_layout.pack(codes), "scales": by_block(scale.to(dtype))}

    def rows_apart(self, columns: int, quantizer: Quantizer) -> int | None:
        return int6_layout.BLOCK_ROWS

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        return self.decode_rows(slot, 0, out, in_, dtype, torch.empty(out * in_, dtype=dtype))

    def decode_rows(
        self, slot: Mapping[str, Tensor], first: int, last: int, in_: int, dtype: torch.dtype, into: Tensor
    ) -> Tensor:
        """The weights of rows first..last - 1, a whole number of blocks: a transposed view (last - first, in_) of
        `into`, a buffer of so many values of `dtype`."""
        rows, groups = last - first, in_ // self.group
        codes = scratch.take("codes", (in_, rows), torch.uint8)
        int6_layout.unpack_transposed(slot["codes"][first:last], codes)
        weight = into.view(groups, self.group, rows)
        weight.copy_(codes.sub_(MIDDLE).view(torch.int8).view_as(weight))
        blocks = slot["scales"][first:last].view(-1, groups, int6_layout.BLOCK_ROWS)
        # one rounding where the scales are of this dtype: codes are exact in it
        weight.mul_(blocks.movedim(1, 0).reshape(groups, 1, rows).to(dtype))
        return weight.view(in_, rows).t()


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
    blocks = scale.view(-1, int6_layout.BLOCK_ROWS, scale.shape[1])
    return blocks.transpose(1, 2).contiguous().view_as(scale)
