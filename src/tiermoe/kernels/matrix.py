"""Matrices for the native kernels: coding, sizes and the addresses of a slot's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tiermoe.formats.checkpoint_quant import CheckpointQuant, Transposed4
from tiermoe.formats.encoding import Encoding
from tiermoe.formats.gguf_types import Gguf, Nvfp4
from tiermoe.formats.int2 import Int2
from tiermoe.formats.int4 import Int4
from tiermoe.formats.int6 import Int6
from tiermoe.formats.int8 import Int8
from tiermoe.formats.nonuniform import NonUniform
from tiermoe.formats.plain import Plain
from tiermoe.formats.trellis import Trellis
from tiermoe.native import (
    GGUF_TYPES,
    GROUPS_OF,
    PUBLISHED,
    UNEVEN,
    Coding,
    ScaleKind,
    _native,
    instruction_set,
    structs,
    takes,
)

# the slot's fields that hold weights, scales, and factors or zeros
_FIELDS: dict[Coding, tuple[str, str | None, str | None]] = {
    **dict.fromkeys((Coding.INT4, Coding.INT2), ("codes", "scales_and_zeros", None)),
    **dict.fromkeys((Coding.INT6, Coding.TCQ2), ("codes", "scales", None)),
    **dict.fromkeys(UNEVEN, ("blocks", None, None)),
    Coding.INT8: ("weight", "scale", None),
    Coding.BF16: ("weight", None, None),
    **dict.fromkeys(GGUF_TYPES, ("blocks", None, None)),
    **dict.fromkeys(PUBLISHED, ("codes", "scales", "factors")),
    Coding.U4: ("codes", "scales", "zeros"),
}
_PACKED: dict[type[Int2 | Int4 | Int6 | Trellis], Coding] = {
    Int2: Coding.INT2, Int4: Coding.INT4, Int6: Coding.INT6, Trellis: Coding.TCQ2,
}  # fmt: skip
_KINDS = {
    "f32": ScaleKind.FLOAT, "bf16": ScaleKind.BF16, "f16": ScaleKind.HALF, "e8m0": ScaleKind.E8M0,
    "e4m3-times": ScaleKind.E4M3_TIMES, "e4m3-over": ScaleKind.E4M3_OVER,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """Matrices (out, in_) of one coding."""

    coding: Coding
    out: int
    in_: int
    group: int  # columns of a row that share a scale: all of them at our 8 and 16 bits
    # of published codes: what scales are, rows and columns that share one, rows that share a factor
    published: tuple[ScaleKind, int, int, int] = (ScaleKind.FLOAT, 1, 1, 1)

    def pack(self, fields: Mapping[str, Tensor]) -> bytes:
        """`structs.Matrix` of a matrix in a slot, valid as long as the slot's tensors live."""
        weights, scales, others = _FIELDS[self.coding]
        return _packed(self, _address(fields, weights), _address(fields, scales), _address(fields, others))

    def absent(self) -> bytes:
        """`structs.Matrix` of an absent matrix: addresses are 0."""
        return _packed(self, 0, 0, 0)


def _address(fields: Mapping[str, Tensor], name: str | None) -> int:
    return fields[name].data_ptr() if name and name in fields else 0


@lru_cache(maxsize=4096)  # slots lie at the same addresses again and again
def _packed(form: MatrixForm, weights: int, scales: int, others: int) -> bytes:
    scale_kind, scale_rows, scale_columns, factor_rows = form.published
    return _native.pack(
        structs.Matrix(
            coding=form.coding, weights=weights, scales=scales, rows=form.out, columns=form.in_, group=form.group,
            zeros_or_factors=others, scale_kind=scale_kind, scale_rows=scale_rows, scale_columns=scale_columns,
            factor_rows=factor_rows,
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
    if isinstance(encoding, Nvfp4):
        encoding = encoding.in_slot
    if isinstance(encoding, CheckpointQuant | Transposed4):
        return _published(encoding, out, in_, dtype)
    if isinstance(encoding, NonUniform):
        coding, group = Coding[f"NL{encoding.bits}"], encoding.group
    elif isinstance(encoding, Int2 | Int4 | Int6 | Trellis):
        coding, group = _PACKED[type(encoding)], encoding.group
    elif isinstance(encoding, Int8 | Plain):
        coding, group = Coding.INT8 if isinstance(encoding, Int8) else Coding.BF16, in_
    elif isinstance(encoding, Gguf) and in_ % encoding.columns == 0:
        coding = Coding[encoding.type.upper()]
        group = GROUPS_OF.get(coding, encoding.columns)
    else:
        return None
    return MatrixForm(coding, out, in_, group) if takes(dtype, coding, out, in_, group) else None


def _published(encoding: CheckpointQuant | Transposed4, out: int, in_: int, dtype: torch.dtype) -> MatrixForm | None:
    if isinstance(encoding, Transposed4):
        coding, rows, columns, factors = Coding.U4, 1, encoding.group, 1
    else:
        coding, rows, columns = Coding[encoding.codes.upper()], encoding.rows, encoding.columns
        factors = encoding.matrices
    group = 16 if columns == 16 else 32
    whole = columns % group == 0 or columns >= in_
    if not whole or (group == 16 and coding != Coding.E2M1) or not takes(dtype, coding, out, in_, group):
        return None
    return MatrixForm(coding, out, in_, group, (_KINDS[encoding.scale], rows, columns, max(1, out // max(1, factors))))


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
