"""What the native kernels are told of a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.native import GGUF_GROUPS, PUBLISHED, UNEVEN, Coding, ScaleKind, _native, instruction_set, takes
from tiermoe.quant.encoding import Encoding
from tiermoe.quant.gguf import Gguf
from tiermoe.quant.int2 import Int2
from tiermoe.quant.int4 import Int4
from tiermoe.quant.int6 import Int6
from tiermoe.quant.int8 import Int8
from tiermoe.quant.plain import Plain
from tiermoe.quant.published import Published
from tiermoe.quant.transposed4 import Transposed4
from tiermoe.quant.uneven import Uneven

# the slot's fields that hold weights, scales, and ladders, factors or zeros
_FIELDS: dict[Coding, tuple[str, str | None, str | None]] = {
    Coding.INT2: ("codes", "scales_and_zeros", "ladders"),
    Coding.INT4: ("codes", "scales_and_zeros", None),
    Coding.INT6: ("codes", "scales", None),
    **dict.fromkeys(UNEVEN, ("blocks", None, None)),
    Coding.INT8: ("weight", "scale", None),
    Coding.BF16: ("weight", None, None),
    **dict.fromkeys(GGUF_GROUPS, ("blocks", None, None)),
    **dict.fromkeys(PUBLISHED, ("codes", "scales", "factors")),
    Coding.U4: ("codes", "scales", "zeros"),
}
_PACKED: dict[type[Int2 | Int4 | Int6], Coding] = {Int2: Coding.INT2, Int4: Coding.INT4, Int6: Coding.INT6}
_KINDS = {
    "f32": ScaleKind.FLOAT, "bf16": ScaleKind.BF16, "f16": ScaleKind.HALF, "e8m0": ScaleKind.E8M0,
    "e4m3-times": ScaleKind.E4M3_TIMES, "e4m3-over": ScaleKind.E4M3_OVER,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """Matrices (out, in_) of one coding; `group` columns of a row share a scale, all of them at our 8 and 16 bits.
    published: of published codes what scales are, the rows and columns that share one, and the rows that share
    a factor."""

    coding: Coding
    out: int
    in_: int
    group: int
    published: tuple[ScaleKind, int, int, int] = (ScaleKind.FLOAT, 1, 1, 1)

    def pack(self, fields: Mapping[str, Tensor]) -> bytes:
        """What the kernels are told of a matrix whose fields a slot holds; valid as long as those tensors live."""
        addresses = (fields[name].data_ptr() if name and name in fields else 0 for name in _FIELDS[self.coding])
        return self._packed(*addresses)

    def absent(self) -> bytes:
        """What they are told in the place of a matrix that is not here."""
        return self._packed(0, 0, 0)

    def _packed(self, weights: int, scales: int, ladders: int) -> bytes:
        return _native.matrix(self.coding, weights, scales, self.out, self.in_, self.group, ladders, *self.published)


def prepared_at_most(columns: int) -> int:
    """Bytes that a product makes of so many columns of a token beforehand (native/matrix.h): AVX2's integers of spans
    of 32 columns, elsewhere sums of groups of 32."""
    return (136 if instruction_set() == "avx2" else 4) * -(-columns // 32)


def matrix_form(encoding: Encoding, out: int, in_: int, dtype: torch.dtype) -> MatrixForm | None:
    """The form of matrices (out, in_) in an encoding, for products in `dtype`; None where the kernels do not take
    them."""
    if isinstance(encoding, Published | Transposed4):
        return _published(encoding, out, in_, dtype)
    if isinstance(encoding, Uneven):
        coding, group = Coding[f"NL{encoding.bits}"], encoding.group
    elif isinstance(encoding, Int2 | Int4 | Int6):
        coding, group = _PACKED[type(encoding)], encoding.group
    elif isinstance(encoding, Int8 | Plain):
        coding, group = Coding.INT8 if isinstance(encoding, Int8) else Coding.BF16, in_
    elif isinstance(encoding, Gguf) and in_ % encoding.columns == 0:
        coding = Coding[encoding.type.upper()]
        group = GGUF_GROUPS[coding]
    else:
        return None
    return MatrixForm(coding, out, in_, group) if takes(dtype, coding, out, in_, group) else None


def _published(encoding: Published | Transposed4, out: int, in_: int, dtype: torch.dtype) -> MatrixForm | None:
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
