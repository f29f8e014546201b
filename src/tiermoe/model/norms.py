"""Norms of a decoder's hidden states."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.kernels.native import norm as native

Norm = Callable[[Tensor], Tensor]
"""x (..., H) → (..., H) in its dtype."""


class RootMeanSquare:
    """weight * x / sqrt(mean(x^2) + epsilon). late: rounded to x's dtype after the product with the weight and not
    before it. centred: the weight is 1 + `weight`, and rounding is late (Qwen3-Next). by_kernel: where it can be; a
    prompt of gpt-oss keeps the bits of torch's operations."""

    def __init__(
        self, weight: Tensor, epsilon: float, late: bool = False, centred: bool = False, by_kernel: bool = True
    ) -> None:
        self.weight, self.epsilon, self.late, self.centred = weight, epsilon, late, centred
        self._native = by_kernel and native.takes(weight)
        self._kind: native.Kind = "rms_centred" if centred else "rms_at_once" if late else "rms"

    def __call__(self, x: Tensor) -> Tensor:
        if self._native and x.dtype == torch.bfloat16 and x.is_contiguous():
            return native.norm(x, self.weight, self.epsilon, self._kind)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        if self.centred:
            return ((1.0 + self.weight.float()) * wide).to(x.dtype)
        return (self.weight * wide).to(x.dtype) if self.late else self.weight * wide.to(x.dtype)


class LayerNorm:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias."""

    def __init__(self, weight: Tensor, bias: Tensor, epsilon: float) -> None:
        self.weight, self.bias, self.epsilon = weight, bias, epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
