"""Norms of a decoder's hidden states, each with its descriptor for the native kernels."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.kernels import norm as native_norm
from tiermoe.kernels.norm import Norm as NativeNorm


class Norm(Protocol):
    """x (..., H) → (..., H) in x's dtype. native: the norm for the attention kernels."""

    @property
    def native(self) -> NativeNorm: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class RootMeanSquare:
    """weight * x / sqrt(mean(x^2) + epsilon), weight (H).

    late: rounded to x's dtype after the product with the weight and not before. centred: the weight is 1 + `weight`,
    and rounding is late (Qwen3-Next). by_kernel: computed by the native kernel where it takes the weight; a prompt of
    gpt-oss keeps the bits of torch's operations."""

    def __init__(
        self, weight: Tensor, epsilon: float, late: bool = False, centred: bool = False, by_kernel: bool = True
    ) -> None:
        self.weight, self.epsilon, self.late, self.centred = weight, epsilon, late, centred
        self._kind: native_norm.Kind = "rms_centred" if centred else "rms_at_once" if late else "rms"
        self._by_kernel = by_kernel and native_norm.takes(weight)

    @property
    def native(self) -> NativeNorm:
        return NativeNorm(self.weight, self.epsilon, self._kind)

    def __call__(self, x: Tensor) -> Tensor:
        if self._by_kernel and x.dtype == torch.bfloat16 and x.is_contiguous():
            return native_norm.norm(x, self.weight, self.epsilon, self._kind)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        if self.centred:
            return ((1.0 + self.weight.float()) * wide).to(x.dtype)
        return (self.weight * wide).to(x.dtype) if self.late else self.weight * wide.to(x.dtype)


class LayerNorm:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias; weight and bias (H), in whose dtype it is computed."""

    def __init__(self, weight: Tensor, bias: Tensor, epsilon: float) -> None:
        self.weight, self.bias, self.epsilon = weight, bias, epsilon

    @property
    def native(self) -> NativeNorm:
        return NativeNorm(self.weight, self.epsilon, "layer", self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(self.weight.dtype)
        return F.layer_norm(wide, self.weight.shape, self.weight, self.bias, self.epsilon).to(x.dtype)
