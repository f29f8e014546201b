"""ggml's types: how a GGUF file has its numbers. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A type of ggml: `block` numbers of a row are in `nbytes` bytes."""

    name: str
    block: int
    nbytes: int
    bits: int  # of a number, or of a code, beside which a block has scales
    plain: str = ""  # torch's name of the dtype, where a number is a value of its own; empty: blocks

    @property
    def dtype(self) -> torch.dtype | None:
        """torch's dtype of numbers that are values of their own; None: blocks."""
        import torch  # late: headers are read while torch is imported

        return getattr(torch, self.plain) if self.plain else None

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of so many numbers, a multiple of `block`."""
        return columns // self.block * self.nbytes


TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4, 32, "float32"),
    1: GgmlType("F16", 1, 2, 16, "float16"),
    30: GgmlType("BF16", 1, 2, 16, "bfloat16"),
    26: GgmlType("I32", 1, 4, 32, "int32"),
    8: GgmlType("Q8_0", 32, 34, 8),
    2: GgmlType("Q4_0", 32, 18, 4),
    3: GgmlType("Q4_1", 32, 20, 4),
    6: GgmlType("Q5_0", 32, 22, 5),
    7: GgmlType("Q5_1", 32, 24, 5),
    10: GgmlType("Q2_K", 256, 84, 2),
    11: GgmlType("Q3_K", 256, 110, 3),
    12: GgmlType("Q4_K", 256, 144, 4),
    13: GgmlType("Q5_K", 256, 176, 5),
    14: GgmlType("Q6_K", 256, 210, 6),
    19: GgmlType("IQ1_S", 256, 50, 1),
    29: GgmlType("IQ1_M", 256, 56, 1),
    16: GgmlType("IQ2_XXS", 256, 66, 2),
    17: GgmlType("IQ2_XS", 256, 74, 2),
    22: GgmlType("IQ2_S", 256, 82, 2),
    18: GgmlType("IQ3_XXS", 256, 98, 3),
    21: GgmlType("IQ3_S", 256, 110, 3),
    20: GgmlType("IQ4_NL", 32, 18, 4),
    23: GgmlType("IQ4_XS", 256, 136, 4),
    34: GgmlType("TQ1_0", 256, 54, 1),
    35: GgmlType("TQ2_0", 256, 66, 2),
    39: GgmlType("MXFP4", 32, 17, 4),
    40: GgmlType("NVFP4", 64, 36, 4),
}
"""The types that tiermoe reads, by the ids that are in the file."""

UNREAD = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 27: "I64", 28: "F64", 41: "Q1_0",
}  # fmt: skip
"""Known types that tiermoe does not read."""
