"""The checkpoint's own weights, "16 bits"."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.quant.encoding import Field, SameInSlot
from tiermoe.quant.quantized import Quantizer


@dataclass(frozen=True)
class Plain(SameInSlot):
    """Field `weight` (N, K) in the compute dtype; no quantizer is used."""

    name: str = "plain"
    bits: int = 16

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (Field("weight", dtype, (out, in_)),)

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"weight": weight.to(dtype).contiguous()}

    def rows_apart(self, columns: int, quantizer: Quantizer) -> int | None:
        return 1

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        return slot["weight"].to(dtype)
