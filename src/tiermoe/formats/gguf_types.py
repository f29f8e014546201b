"""Types of a GGUF file's numbers: ggml's types, and the encodings of those that are blocks.

Blocks are used as they are in the file: the encodings in which GGUF files are published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tiermoe.errors import StoreError
from tiermoe.formats.encoding import DECODED_WEIGHTS, Field, FixedEncoding
from tiermoe.formats.quantizers import Quantizer

PREFIX = "gguf/"


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A type of ggml: `block` numbers of a row are in `nbytes` bytes."""

    name: str
    block: int
    nbytes: int
    bits: int  # of a number, or of a code, beside which a block has scales
    dtype: torch.dtype | None = None  # torch's, where a number is a value of its own; None: blocks

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of so many numbers, a multiple of `block`."""
        return columns // self.block * self.nbytes


TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4, 32, torch.float32),
    1: GgmlType("F16", 1, 2, 16, torch.float16),
    30: GgmlType("BF16", 1, 2, 16, torch.bfloat16),
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
    20: GgmlType("IQ4_NL", 32, 18, 4),
    23: GgmlType("IQ4_XS", 256, 136, 4),
    39: GgmlType("MXFP4", 32, 17, 4),
}
"""The types that tiermoe reads, by the ids that are in the file."""

UNREAD = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
    41: "Q1_0",
}  # fmt: skip
"""Known types that tiermoe does not read."""


@dataclass(frozen=True)
class Gguf(FixedEncoding):
    """Blocks of a GGUF file. Field: `blocks`, bytes (out, in_ / columns * nbytes)."""

    read_from: ClassVar[str] = "GGUF files"

    type: str  # of ggml, in lower case
    columns: int  # weights of a block
    nbytes: int  # bytes of a block
    bits: int  # of a code

    @property
    def name(self) -> str:
        return PREFIX + self.type

    @property
    def label(self) -> str:
        return self.type.upper()

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        """Raises StoreError where a row is no whole number of blocks."""
        if in_ % self.columns:
            raise StoreError(f"a row of {in_} columns is no whole number of {self.label} blocks of {self.columns}")
        return (Field("blocks", torch.uint8, (out, in_ // self.columns * self.nbytes)),)

    def row_multiple(self, columns: int, quantizer: Quantizer) -> int | None:
        return 1

    def decoded(self, slot: Mapping[str, Tensor], in_: int) -> Iterator[tuple[int, Tensor]]:
        """The weights in float32, never rounded, some rows at a time: (first row, (rows, in_))."""
        from gguf.quants import GGMLQuantizationType, dequantize  # imports far more than this

        blocks, some = slot["blocks"].cpu(), max(1, DECODED_WEIGHTS // in_)
        for first in range(0, blocks.shape[0], some):
            rows = dequantize(blocks[first : first + some].numpy(), GGMLQuantizationType[self.label])
            yield first, torch.from_numpy(rows)


ENCODINGS = tuple(
    Gguf(kind.name.lower(), kind.block, kind.nbytes, kind.bits) for kind in TYPES.values() if kind.dtype is None
)


def gguf_encoding(name: str) -> Gguf:
    """The encoding of a type ("Q4_K", in any case, or "gguf/q4_k"). Raises StoreError for others."""
    wanted = name.lower().removeprefix(PREFIX)
    for each in ENCODINGS:
        if each.type == wanted:
            return each
    known = ", ".join(each.label for each in ENCODINGS)
    raise StoreError(f"no kernel takes GGUF blocks of type {wanted.upper()!r}: choose a file of {known}")
