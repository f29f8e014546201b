"""A weight format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.formats.encoding import Field, SameInSlot
from tiermoe.formats.quantizers import LinearQuantizer, Quantizer, nearest_codes


@dataclass(frozen=True)
class Int5(SameInSlot):
    """5 bits, a scale per row: eight codes in five bytes. Fields `codes` uint8 (N, 5 K / 8) and `scale` (N):
    w = (code - 16) * scale. K is a multiple of 8."""

    name: str = "int5"
    bits: int = 5

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return Field("codes", torch.uint8, (out, in_ * 5 // 8)), Field("scale", dtype, (out,))

    def row_multiple(self, columns: int, quantizer: Quantizer) -> int | None:
        return 1

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        scale = LinearQuantizer.row_scale(weight, self.bits).to(dtype)
        codes = nearest_codes(weight, scale, -16 * scale, 0, 31, torch.int64).unflatten(1, (-1, 8))
        eight = (codes << 5 * torch.arange(8)).sum(-1, keepdim=True)
        return {"codes": (eight >> 8 * torch.arange(5)).to(torch.uint8).flatten(1), "scale": scale.view(-1)}

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        eight = (slot["codes"].view(out, -1, 5).long() << 8 * torch.arange(5)).sum(-1, keepdim=True)
        codes = eight >> 5 * torch.arange(8) & 31
        return (codes.flatten(1).to(dtype) - 16) * slot["scale"][:, None].to(dtype)
