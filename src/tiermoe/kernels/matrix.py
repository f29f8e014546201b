"""Matrices for the native kernels: coding, sizes and the addresses of a slot's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tiermoe.formats.encoding import Encoding, InC
from tiermoe.native import CODINGS, _native, instruction_set, structs, takes


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """Matrices (out, in_) of one coding."""

    how: InC
    out: int
    in_: int

    def pack(self, fields: Mapping[str, Tensor]) -> bytes:
        """`structs.Matrix` of a matrix in a slot, valid as long as the slot's tensors live."""
        how = self.how
        return _packed(self, _address(fields, how.weights), _address(fields, how.scales), _address(fields, how.others))

    def absent(self) -> bytes:
        """`structs.Matrix` of an absent matrix: addresses are 0."""
        return _packed(self, 0, 0, 0)


def _address(fields: Mapping[str, Tensor], name: str | None) -> int:
    return fields[name].data_ptr() if name and name in fields else 0


@lru_cache(maxsize=4096)  # slots lie at the same addresses again and again
def _packed(form: MatrixForm, weights: int, scales: int, others: int) -> bytes:
    how = form.how
    scale_kind, scale_rows, scale_columns, factor_rows = how.published
    return _native.pack(
        structs.Matrix(
            coding=CODINGS[how.coding], weights=weights, scales=scales, zeros_or_factors=others, rows=form.out,
            columns=form.in_, group=how.group, scale_kind=scale_kind, scale_rows=scale_rows,
            scale_columns=scale_columns, factor_rows=factor_rows,
        )
    )  # fmt: skip


def plain(tensor: Tensor) -> bool:
    """Whether the kernels take a tensor by its address."""
    return tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and tensor.device.type == "cpu"


def address(tensor: Tensor | None) -> int:
    """The address of a tensor; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def prepared_at_most(columns: int) -> int:
    """Bytes of a token's prepared input of so many columns (matrix_prepared in native/matrix.h): AVX2's integers of
    spans of 32 columns, in other instruction sets sums of groups of 32."""
    return (136 if instruction_set() == "avx2" else 4) * -(-columns // 32)


def matrix_form(encoding: Encoding, out: int, in_: int, dtype: torch.dtype) -> MatrixForm | None:
    """The form of matrices (out, in_) in an encoding, for products in `dtype`; None where the kernels do not take
    them."""
    form = _form(encoding, out, in_)
    return form if form and takes(dtype, form.how.coding, out, in_, form.how.group) else None


@lru_cache(maxsize=4096)
def _form(encoding: Encoding, out: int, in_: int) -> MatrixForm | None:
    how = encoding.in_c(out, in_)
    return MatrixForm(how, out, in_) if how else None


@dataclass(frozen=True)
class SlotMatrix:
    """A packed matrix (rows, columns) in a slot. `codes`, `scale`, `zero`: where its fields begin, in bytes
    from the slot's first one, multiples of 16. bits 2 and 4: fields as `triton_kernels.int2_linear` and `int4_linear`
    take them, `group` columns to a scale; bits 8: as `int8_linear` does, `group` and `zero` unused.
    `dtype` is that of scales and zeros."""

    rows: int
    columns: int
    bits: int
    group: int
    dtype: torch.dtype
    codes: int
    scale: int
    zero: int
