"""Norms of rows by the native kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tiermoe.kernels.linear import address, plain
from tiermoe.native import _native, available, structs

NORM_COLUMNS = 16  # a width is a multiple of them

KINDS = {"rms": 0, "rms_at_once": 1, "rms_centred": 2, "layer": 3}
"""Of norms; the order is that of native/norm.h."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of a layer. `rms` rounds before it multiplies with the weight, `rms_at_once` after, and `rms_centred` so
    too, by 1 + weight; `layer` subtracts the mean."""

    weight: Tensor  # bfloat16 (width)
    epsilon: float
    kind: Literal["rms", "rms_at_once", "rms_centred", "layer"] = "rms"
    bias: Tensor | None = None  # of `layer`, bfloat16 (width)

    def suits(self) -> bool:
        """Whether the kernels take this norm."""
        if self.weight.ndim != 1 or self.weight.numel() % NORM_COLUMNS or not plain(self.weight):
            return False
        return self.bias is None or (self.kind == "layer" and plain(self.bias) and self.bias.shape == self.weight.shape)

    def described(self) -> structs.Norm:
        """`structs.Norm`; valid as long as the tensors live."""
        return structs.Norm(
            weight=self.weight.data_ptr(), bias=address(self.bias), width=self.weight.numel(), epsilon=self.epsilon,
            kind=KINDS[self.kind],
        )  # fmt: skip


Kind = Literal["rms", "rms_at_once", "rms_centred"]


def takes(weight: Tensor) -> bool:
    """Whether the kernels take a norm's weight (H)."""
    return plain(weight) and weight.ndim == 1 and weight.numel() % NORM_COLUMNS == 0 and available()


def norm(x: Tensor, weight: Tensor, epsilon: float, kind: Kind = "rms") -> Tensor:
    """weight * x / sqrt(mean(x^2) + epsilon), for contiguous x (..., H) in bfloat16; kind: of `Norm`."""
    out = torch.empty_like(x)
    width = weight.numel()
    _native.norm(
        x.data_ptr(), weight.data_ptr(), epsilon, KINDS[kind], x.numel() // width, width, out.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return out
