"""What the native kernels are told of a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.native import GGUF_GROUPS, Coding, _native, takes
from tiermoe.quant.encoding import Encoding
from tiermoe.quant.gguf import Gguf
from tiermoe.quant.int2 import Int2
from tiermoe.quant.int4 import Int4
from tiermoe.quant.int6 import Int6
from tiermoe.quant.int8 import Int8
from tiermoe.quant.nl4 import Nl4
from tiermoe.quant.plain import Plain

# the slot's fields that hold weights, scales and ladders
_FIELDS: dict[Coding, tuple[str, str | None, str | None]] = {
    Coding.INT2: ("codes", "scales_and_zeros", "ladders"),
    Coding.INT4: ("codes", "scales_and_zeros", None),
    Coding.INT6: ("codes", "scales", None),
    Coding.NL4: ("blocks", None, None),
    Coding.INT8: ("weight", "scale", None),
    Coding.BF16: ("weight", None, None),
    **dict.fromkeys(GGUF_GROUPS, ("blocks", None, None)),
}
_PACKED: dict[type[Int2 | Int4 | Int6 | Nl4], Coding] = {
    Int2: Coding.INT2, Int4: Coding.INT4, Int6: Coding.INT6, Nl4: Coding.NL4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """Matrices (out, in_) of one coding; `group` columns of a row share a scale, all of them at our 8 and 16 bits."""

    coding: Coding
    out: int
    in_: int
    group: int

    def pack(self, fields: Mapping[str, Tensor]) -> bytes:
        """What the kernels are told of a matrix whose fields a slot holds; valid as long as those tensors live."""
        weights, *others = _FIELDS[self.coding]
        return self._packed(fields[weights].data_ptr(), *(fields[name].data_ptr() if name else 0 for name in others))

    def absent(self) -> bytes:
        """What they are told in the place of a matrix that is not here."""
        return self._packed(0, 0, 0)

    def _packed(self, weights: int, scales: int, ladders: int) -> bytes:
        return _native.matrix(self.coding, weights, scales, self.out, self.in_, self.group, ladders)


def matrix_form(encoding: Encoding, out: int, in_: int, dtype: torch.dtype) -> MatrixForm | None:
    """The form of matrices (out, in_) in an encoding, for products in `dtype`; None where the kernels do not take
    them."""
    if isinstance(encoding, Int2 | Int4 | Int6 | Nl4):
        coding, group = _PACKED[type(encoding)], encoding.group
    elif isinstance(encoding, Int8 | Plain):
        coding, group = Coding.INT8 if isinstance(encoding, Int8) else Coding.BF16, in_
    elif isinstance(encoding, Gguf) and in_ % encoding.columns == 0:
        coding = Coding[encoding.type.upper()]
        group = GGUF_GROUPS[coding]
    else:
        return None
    return MatrixForm(coding, out, in_, group) if takes(dtype, coding, out, in_, group) else None
