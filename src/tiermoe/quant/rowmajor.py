"""4 bits, row by row: the format of the Triton kernels; readable on any device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tiermoe.quant.encoding import Field, SameInSlot
from tiermoe.quant.quantized import Quantizer, levels, nearest_codes

LAYOUT = "rowmajor"


@dataclass(frozen=True)
class RowMajorInt4(SameInSlot):
    """Fields `codes` uint8 (N, K / 2), `scale` and `zero` (N, K / group) in the compute dtype.

    Byte j of a row holds the code of column 2 j in its low nibble and that of column 2 j + 1 in its high one.
    With codes 0..15, w = (code - 8) * scale + zero, in float32 and rounded once to the compute dtype: the
    very weights of Int4 under the same quantizer and group, in an order that does not depend on the
    machine."""

    group: int
    bits: ClassVar[int] = 4

    @property
    def name(self) -> str:
        return f"int4/{LAYOUT}/g{self.group}"

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        groups = in_ // self.group
        return (
            Field("codes", torch.uint8, (out, in_ // 2)),
            Field("scale", dtype, (out, groups)),
            Field("zero", dtype, (out, groups)),
        )

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        scale, zero = levels(weight, quantizer, self.group, dtype)
        # codes for the scales and zeros as stored, so that their rounding to `dtype` costs next to nothing
        codes = nearest_codes(weight, scale, zero, -8, 7, torch.int8).add_(8).view(torch.uint8)
        return {"codes": pack_nibbles(codes), "scale": scale, "zero": zero}

    def rows_apart(self, columns: int, quantizer: Quantizer) -> int | None:
        return quantizer.rows_apart(columns)

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        levels = unpack_nibbles(slot["codes"]).view(out, -1, self.group)
        return on_scale(levels, slot["scale"], slot["zero"], dtype).view(out, in_)


def on_scale(levels: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """(level - 8) * scale + zero in `dtype`, of levels 0..15, uint8 (N, G, group), which are written over; `scale` and
    `zero` (N, G)."""
    values = levels.view(torch.int8).sub_(8).to(dtype)
    # one rounding: addcmul computes in float32 inside, whatever its operands' dtype
    return torch.addcmul(zero.to(dtype)[..., None], values, scale.to(dtype)[..., None], out=values)


def pack_nibbles(nibbles: Tensor) -> Tensor:
    """Values 0..15, uint8 (..., K), two to a byte: (..., K / 2), the even one in the low nibble."""
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    """What `pack_nibbles` packed: uint8 (..., K / 2) → (..., K)."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
