"""Encodings of a GGUF file's blocks, which are used as they are in the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tiermoe.errors import StoreError
from tiermoe.formats.encoding import DECODED_WEIGHTS, Field, FixedEncoding
from tiermoe.formats.ggml_types import TYPES
from tiermoe.formats.quantizers import Quantizer

PREFIX = "gguf/"


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
    Gguf(kind.name.lower(), kind.block, kind.nbytes, kind.bits) for kind in TYPES.values() if not kind.plain
)


def gguf_encoding(name: str) -> Gguf:
    """The encoding of a type ("Q4_K", in any case, or "gguf/q4_k"). Raises StoreError for others."""
    wanted = name.lower().removeprefix(PREFIX)
    for each in ENCODINGS:
        if each.type == wanted:
            return each
    known = ", ".join(each.label for each in ENCODINGS)
    raise StoreError(f"no kernel takes GGUF blocks of type {wanted.upper()!r}: choose a file of {known}")
