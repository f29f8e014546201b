"""How a GGUF file stores numbers: the types of ggml, by the ids that are in the file."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GgmlType:
    """`block` numbers of a row lie in `nbytes` bytes. dtype: torch's, where a number is a value of its own."""

    name: str
    block: int
    nbytes: int
    dtype: torch.dtype | None = None

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of so many numbers, a multiple of `block`."""
        return columns // self.block * self.nbytes


TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4, torch.float32),
    1: GgmlType("F16", 1, 2, torch.float16),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    20: GgmlType("IQ4_NL", 32, 18),
    23: GgmlType("IQ4_XS", 256, 136),
    30: GgmlType("BF16", 1, 2, torch.bfloat16),
    39: GgmlType("MXFP4", 32, 17),
}
"""Those that are read."""

UNREAD = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
    41: "Q1_0",
}  # fmt: skip
"""Those that are known and not read."""


def supported() -> str:
    """The types that are read, for people."""
    return ", ".join(kind.name for kind in TYPES.values())
