"""8 bits: one scale per row, the format of ``torch.ops.aten._weight_int8pack_mm``."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe import native
from tiermoe.formats.encoding import Encoded, EncodedInC, Field, InC, SameInSlot, scratch
from tiermoe.formats.quantizers import LinearQuantizer, Quantizer, nearest_codes


@dataclass(frozen=True)
class Int8(SameInSlot, EncodedInC):
    """8 bits: w = weight * scale. Fields: `weight` int8 (N, K), `scale` (N).

    The operator takes one scale per row and no offset: the linear rule serves, whatever `quantizer` is."""

    name: str = "int8"
    bits: int = 8

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (Field("weight", torch.int8, (out, in_)), Field("scale", dtype, (out,)))

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        scale = LinearQuantizer.row_scale(weight, self.bits).to(dtype)
        codes = nearest_codes(weight, scale, torch.zeros_like(scale), -128, 127, torch.int8)
        return {"weight": codes, "scale": scale.view(-1)}

    def encode_in_c(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> Encoded:
        scale = LinearQuantizer.row_scale(weight, self.bits).to(dtype)
        codes = scratch.take("packed codes", tuple(weight.shape), torch.int8)
        squares = native.encode("INT8", weight, weight.shape[1], dtype, scale.float(), None, codes)
        return {"weight": codes, "scale": scale.view(-1)}, squares

    def row_multiple(self, columns: int, quantizer: Quantizer) -> int | None:
        return 1

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        return slot["weight"].to(dtype).mul_(slot["scale"][:, None].to(dtype))

    def in_c(self, out: int, in_: int) -> InC | None:
        return InC("INT8", in_, "weight", "scale")
