"""Linear layers of a decoder: on packed weights, and on the checkpoint's own."""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.formats.plain import Plain
from tiermoe.kernels.attention import PackedMatrix
from tiermoe.kernels.linear import LinearKernel, linear, multiplies_bfloat16, product
from tiermoe.kernels.matrix import matrix_form
from tiermoe.model.by_token import by_token
from tiermoe.native import available
from tiermoe.types import FEW_TOKENS

SMALL = 1 << 22
"""Weights of a matrix at most that few tokens take one by one where the native kernels compute others and not this one,
as of betas and decays in Qwen3.5 at 4 bits. So a token has the bits that it has alone."""


class Linear(Protocol):
    """x (T, in) → (T, out), with the bias where there is one. batch_invariant: a token's result does not depend on the
    other tokens of a call of up to FEW_TOKENS. packed: the weight for the attention kernels."""

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
        native = matrix_form(packed.encoding, packed.out, packed.in_, dtype) is not None
        beside = available() and all(field.device.type == "cpu" for field in packed.fields.values())
        small = packed.out * packed.in_ <= SMALL
        self._by_token = not native and beside and small and dtype == torch.bfloat16
        self.batch_invariant = native or self._by_token
        self._kernel = kernel
        self._taken = None if columns is None else columns.argsort()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        if self._taken is not None:
            rows = rows[:, self._taken]
        result = by_token(self._product, rows) if self._by_token else self._product(rows)
        if self.bias is not None:
            result = result + self.bias
        return result.view(*x.shape[:-1], self.out_features)

    def _product(self, rows: Tensor) -> Tensor:
        return self._kernel(rows, self.packed.fields, self.out_features, self.in_features)


class PlainLinear:
    """A linear layer on a weight (out, in) as the checkpoint has it, in whose dtype it computes. Up to FEW_TOKENS take
    the native product; more tokens take it where torch has no good one."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        out, in_ = weight.shape
        self.packed = PackedMatrix(Plain(), {"weight": weight}, out, in_, bias)
        fits = weight.is_contiguous() and weight.device.type == "cpu"
        self._form = matrix_form(Plain(), out, in_, weight.dtype) if fits else None
        self._tokens = FEW_TOKENS if multiplies_bfloat16() else math.inf

    @property
    def batch_invariant(self) -> bool:
        return self._form is not None

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.packed.fields["weight"], self.packed.bias
        x = x.to(weight.dtype)
        if self._form is not None and x.shape[0] <= self._tokens:
            result = linear(x, self._form, self.packed.fields)
        elif multiplies_bfloat16():
            return F.linear(x, weight, bias)
        else:
            result = product(x, weight)
        return result if bias is None else result + bias
