"""Blocks of a GGUF file, used as they lie: the encodings that files are published in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.errors import ConfigError, StoreError
from tiermoe.quant.encoding import Field, SameInSlot
from tiermoe.quant.quantized import Quantizer

PREFIX = "gguf/"
DECODED_WEIGHTS = 1 << 18
"""Weights that are decoded at a time: the package's temporaries are a few times as large."""


@dataclass(frozen=True)
class Gguf(SameInSlot):
    """Field `blocks`, bytes (out, in_ / columns * nbytes): a row is blocks of `columns` weights in `nbytes` bytes, as
    GGML's type `type` defines them. `bits`: those of a code; its scales come on top."""

    type: str
    columns: int
    nbytes: int
    bits: int

    @property
    def name(self) -> str:
        return PREFIX + self.type

    @property
    def label(self) -> str:
        """What people call it."""
        return self.type.upper()

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        """Raises StoreError where the columns are no whole blocks."""
        if in_ % self.columns:
            raise StoreError(
                f"a row of {in_} columns is no whole number of {self.type.upper()} blocks of {self.columns}"
            )
        return (Field("blocks", torch.uint8, (out, in_ // self.columns * self.nbytes)),)

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        """Raises ConfigError: such blocks come quantised."""
        raise ConfigError(f"{self.type.upper()} is read from GGUF files and never packed: choose 8, 6, 4, 3 or 2 bits")

    def rows_apart(self, columns: int, quantizer: Quantizer) -> int | None:
        return 1

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        weight = torch.empty((out, in_), dtype=dtype)
        for first, rows in self.decoded(slot, in_):
            weight[first : first + rows.shape[0]] = rows
        return weight

    def decoded(self, slot: Mapping[str, Tensor], in_: int) -> Iterator[tuple[int, Tensor]]:
        """The weights in float32, never rounded, some rows at a time: (first row, (rows, in_))."""
        from gguf.quants import GGMLQuantizationType, dequantize  # imports far more than this

        blocks, some = slot["blocks"].cpu(), max(1, DECODED_WEIGHTS // in_)
        for first in range(0, blocks.shape[0], some):
            rows = dequantize(blocks[first : first + some].numpy(), GGMLQuantizationType[self.type.upper()])
            yield first, torch.from_numpy(rows)


TYPES = tuple(
    Gguf(*row)
    for row in (
        # type, columns and bytes of a block, bits of a code
        ("q8_0", 32, 34, 8),
        ("q4_0", 32, 18, 4),
        ("q4_1", 32, 20, 4),
        ("q5_0", 32, 22, 5),
        ("q5_1", 32, 24, 5),
        ("q2_k", 256, 84, 2),
        ("q3_k", 256, 110, 3),
        ("q4_k", 256, 144, 4),
        ("q5_k", 256, 176, 5),
        ("q6_k", 256, 210, 6),
        ("iq4_nl", 32, 18, 4),
        ("iq4_xs", 256, 136, 4),
        ("mxfp4", 32, 17, 4),
    )
)


def gguf_encoding(name: str) -> Gguf:
    """The encoding of a GGML type ("Q4_K", in any case, or "gguf/q4_k"). Raises StoreError for others."""
    wanted = name.lower().removeprefix(PREFIX)
    for each in TYPES:
        if each.type == wanted:
            return each
    known = ", ".join(each.type.upper() for each in TYPES)
    raise StoreError(f"no kernel takes GGUF blocks of type {wanted.upper()!r}: choose a file of {known}")
