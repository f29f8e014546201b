"""A weight format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.quant.encoding import Field, SameInSlot
from tiermoe.quant.quantized import Quantizer, nearest_codes
from tiermoe.quant.quantizers import LinearQuantizer


@dataclass(frozen=True)
class Int6(SameInSlot):
    """6 bits, a scale per row: four codes in three bytes. Fields `codes` uint8 (N, 3 K / 4) and `scale` (N):
    w = (code - 32) * scale. K is a multiple of 4."""

    name: str = "int6"
    bits: int = 6

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return Field("codes", torch.uint8, (out, in_ * 3 // 4)), Field("scale", dtype, (out,))

    def rows_apart(self, columns: int, quantizer: Quantizer) -> int | None:
        return 1

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        scale = LinearQuantizer.row_scale(weight, self.bits).to(dtype)
        a, b, c, d = nearest_codes(weight, scale, -32 * scale, 0, 63, torch.uint8).unflatten(1, (-1, 4)).unbind(-1)
        codes = torch.stack((a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2), -1)
        return {"codes": codes.flatten(1), "scale": scale.view(-1)}

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        a, b, c = slot["codes"].view(out, -1, 3).unbind(-1)
        codes = torch.stack((a & 63, (a >> 6 | b << 2) & 63, (b >> 4 | c << 4) & 63, c >> 2), -1)
        return (codes.flatten(1).to(dtype) - 32) * slot["scale"][:, None].to(dtype)
