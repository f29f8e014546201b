"""Parts of layers: linear layers on packed weights and on the checkpoint's own, norms with their descriptors for the
native kernels."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.formats.plain import Plain
from tiermoe.kernels import norm as native_norm
from tiermoe.kernels.attention import PackedMatrix
from tiermoe.kernels.gpu import rms_norm
from tiermoe.kernels.linear import (
    LinearKernel,
    NativeFirst,
    decoded_form,
    linear,
    product,
)
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
    gpt-oss keeps the bits of torch's operations. On a GPU one operator of torch computes it, if the weight is (H)."""

    def __init__(
        self, weight: Tensor, epsilon: float, late: bool = False, centred: bool = False, by_kernel: bool = True
    ) -> None:
        self.weight, self.epsilon, self.late, self.centred = weight, epsilon, late, centred
        self._kind: native_norm.Kind = "rms_centred" if centred else "rms_at_once" if late else "rms"
        self._by_kernel = by_kernel and native_norm.takes(weight)
        self._fused = weight.device.type == "cuda" and weight.ndim == 1 and not centred

    @property
    def native(self) -> NativeNorm:
        return NativeNorm(self.weight, self.epsilon, self._kind)

    def __call__(self, x: Tensor) -> Tensor:
        if self._by_kernel and x.dtype == torch.bfloat16 and x.is_contiguous():
            return native_norm.norm(x, self.weight, self.epsilon, self._kind)
        if self._fused:
            return rms_norm(x, self.weight, self.epsilon, self.late)
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


class Linear(Protocol):
    """x (T, in) → (T, out), with the bias if there is one. batch_invariant: a token's result does not depend on the
    other tokens of a call. packed: the weight for the attention kernels."""

    @property
    def batch_invariant(self) -> bool: ...

    @property
    def packed(self) -> PackedMatrix: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class PackedLinear(torch.nn.Module):
    """A linear layer on packed weights (in_features → out_features), a module so that it can stand in a transformers
    model. `weight` answers questions about shape and dtype only. columns: where each column of the weight lies in the
    packed fields; None: in order. (Only layers that are called have another order: the attention kernels take `packed`
    itself.)"""

    def __init__(
        self, kernel: LinearKernel, packed: PackedMatrix, dtype: torch.dtype, columns: Tensor | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = packed.in_, packed.out
        self.bias = packed.bias
        self.weight = torch.empty((packed.out, packed.in_), dtype=dtype, device="meta")
        self.packed = packed
        form = packed.form(dtype)
        if form is None and isinstance(kernel, NativeFirst):
            form = decoded_form(packed.out, packed.in_, dtype)
        self.batch_invariant = form is not None
        self._kernel = kernel
        self._taken = None if columns is None else columns.argsort()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        if self._taken is not None:
            rows = rows[:, self._taken]
        result = self._kernel(rows, self.packed.fields, self.out_features, self.in_features)
        if self.bias is not None:
            result = result + self.bias
        return result.view(*x.shape[:-1], self.out_features)


class PlainLinear:
    """A linear layer on an unquantised weight (out, in), computed in the weight's dtype by the native product, or by
    torch for shapes and dtypes without a native product."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        out, in_ = weight.shape
        self.packed = PackedMatrix(Plain(), {"weight": weight}, out, in_, bias)
        self._form = self.packed.form(weight.dtype) if weight.is_contiguous() else None

    @property
    def batch_invariant(self) -> bool:
        return self._form is not None

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.packed.fields["weight"], self.packed.bias
        x = x.to(weight.dtype)
        if self._form is None:
            return product(x, weight, bias)
        result = linear(x, self._form, self.packed.fields)
        return result if bias is None else result + bias
