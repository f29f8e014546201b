"""4 bits: codes in the order of `int4_layout`, and a scale and a zero for each group of a row."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tiermoe.quant import int4_layout
from tiermoe.quant.encoding import Field, SameInSlot
from tiermoe.quant.quantized import Quantizer, levels, nearest_codes
from tiermoe.quant.scratch import scratch

BLOCK_WEIGHTS = 1 << 20  # weights decoded at a time: bounds the temporaries to 6 bytes each


@dataclass(frozen=True)
class Int4(SameInSlot):
    """Fields `codes` uint8 (N, K / 2) in the CPUs' order and `scales_and_zeros` (K / group, N, 2).

    w = (code - 8) * scale + zero."""

    layout: str
    group: int
    bits: ClassVar[int] = 4

    @property
    def name(self) -> str:
        return f"int4/{self.layout}/g{self.group}"

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (
            Field("codes", torch.uint8, (out, in_ // 2)),
            Field("scales_and_zeros", dtype, (in_ // self.group, out, 2), rows_at=1),
        )

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        scale, zero = levels(weight, quantizer, self.group, dtype)
        # codes for the scales and zeros as stored, so that their rounding to `dtype` costs next to nothing
        codes = nearest_codes(weight, scale, zero, -8, 7, torch.int8).add_(8)
        pairs = torch.stack((scale.t(), zero.t()), dim=-1).contiguous()
        return {"codes": int4_layout.pack(codes), "scales_and_zeros": pairs}

    def rows_apart(self, columns: int, quantizer: Quantizer) -> int | None:
        return math.lcm(int4_layout.BLOCK_ROWS, quantizer.rows_apart(columns))

    def decode(
        self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        """As Encoding.decode; `into`: a buffer of out * in_ values of `dtype` that the result then lies in."""
        into = torch.empty(out * in_, dtype=dtype) if into is None else into
        weight = into.view(in_ // self.group, self.group, out)
        # contiguous: with pairs as operands addcmul is seven times slower
        scale, zero = slot["scales_and_zeros"].to(dtype).movedim(-1, 0).contiguous().unsqueeze(2)
        step = max(1, BLOCK_WEIGHTS // (self.group * out))
        for first in range(0, len(weight), step):
            part = weight[first : first + step]
            columns = (first * self.group, (first + len(part)) * self.group)
            codes = int4_layout.unpack_transposed(slot["codes"], *columns).view(torch.int8).sub_(8)
            groups = slice(first, first + step)
            # addcmul computes in float32 inside, whatever its operands' dtype: one rounding
            values = scratch.take("values", tuple(part.shape), dtype).copy_(codes.view_as(part))
            torch.addcmul(zero[groups], values, scale[groups], out=part)
        return weight.view(in_, out).t()
