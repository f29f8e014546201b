"""Encodings of a GGUF file's blocks.

`Gguf`: kernels take the blocks as they are in the file. `Nvfp4`: codes and scales are put in the order of checkpoints'
NVFP4 on the way into a slot; none of them changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tiermoe import native
from tiermoe.errors import StoreError
from tiermoe.formats.checkpoint_quant import CheckpointQuant
from tiermoe.formats.encoding import DECODED_WEIGHTS, Field, FixedEncoding, InC, OfMatrices
from tiermoe.formats.gguf_header import TYPES

PREFIX = "gguf/"
_GROUP = 16  # columns of NVFP4 that share a scale
_NOT_A_NUMBER = 0x7F  # a scale that ggml takes for 0


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

    def decoded(self, slot: Mapping[str, Tensor], in_: int) -> Iterator[tuple[int, Tensor]]:
        """The weights in float32, never rounded, some rows at a time: (first row, (rows, in_))."""
        from gguf.quants import GGMLQuantizationType, dequantize  # imports far more than this

        blocks, some = slot["blocks"].cpu(), max(1, DECODED_WEIGHTS // in_)
        for first in range(0, blocks.shape[0], some):
            rows = dequantize(blocks[first : first + some].numpy(), GGMLQuantizationType[self.label])
            yield first, torch.from_numpy(rows)

    def in_c(self, out: int, in_: int) -> InC | None:
        group = native.GROUPS_OF.get(self.label, self.columns)
        return None if in_ % self.columns else InC(self.label, group, "blocks")


@dataclass(frozen=True)
class Nvfp4(OfMatrices, FixedEncoding):
    """NVFP4's blocks of 64 columns, and a factor of all of a matrix, where the file has one (llama.cpp's `.scale`).

    Stored fields: `blocks`, bytes (out, in_ / 64 * 36): of a block four scales, then eight bytes for each of them,
    whose low halves are the codes of eight columns and whose high halves those of the next eight; where there are
    factors, `factors` (matrices), float32. Slot fields: those of `in_slot`."""

    read_from: ClassVar[str] = "GGUF files"

    matrices: int = 0  # of equal rows, one after the other, each with a factor; 0: no factors
    bits: int = 4

    @property
    def name(self) -> str:
        return f"{PREFIX}nvfp4" + (f"/{self.matrices}" if self.matrices else "")

    @property
    def label(self) -> str:
        return "NVFP4"

    @property
    def in_slot(self) -> CheckpointQuant:
        """The encoding that kernels take."""
        return CheckpointQuant("e2m1", "e4m3-times", 1, _GROUP, max(1, self.matrices))

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        """Raises StoreError where a row is no whole number of blocks."""
        (blocks,) = _NVFP4.stored_fields(out, in_, dtype)
        return (blocks, Field("factors", torch.float32, (self.matrices,))) if self.matrices else (blocks,)

    def slot_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return self.in_slot.slot_fields(out, in_, dtype)

    def widen(self, stored: Mapping[str, Tensor], slot: Mapping[str, Tensor]) -> None:
        """Puts codes and scales in the order of columns."""
        blocks = stored["blocks"].view(slot["codes"].shape[0], -1, _NVFP4.nbytes)
        groups = _NVFP4.columns // _GROUP
        scales = blocks[..., :groups]
        halves = blocks[..., groups:].reshape(*blocks.shape[:2], groups, _GROUP // 2)
        slot["scales"].copy_(torch.where(scales == _NOT_A_NUMBER, 0, scales).flatten(1))
        codes = torch.cat((halves & 15, halves >> 4), dim=-1)
        slot["codes"].copy_((codes[..., 0::2] | codes[..., 1::2] << 4).flatten(1))
        slot["factors"].copy_(stored["factors"] if self.matrices else torch.ones(1))

    def decoded(self, slot: Mapping[str, Tensor], in_: int) -> Iterator[tuple[int, Tensor]]:
        return self.in_slot.decoded(slot, in_)

    def in_c(self, out: int, in_: int) -> InC | None:
        return self.in_slot.in_c(out, in_)


_NVFP4 = Gguf("nvfp4", 64, 36, 4)
ENCODINGS = tuple(
    Gguf(kind.name.lower(), kind.block, kind.nbytes, kind.bits)
    for kind in TYPES.values()
    if not kind.plain and kind.name != "NVFP4"
)
"""Those that kernels take as they are."""


def gguf_encoding(name: str) -> Gguf | Nvfp4:
    """The encoding of a type ("Q4_K", in any case, "gguf/q4_k" or "gguf/nvfp4/2"). Raises StoreError for others."""
    wanted, _, count = name.lower().removeprefix(PREFIX).partition("/")
    if wanted == "nvfp4" and (not count or (count.isdecimal() and int(count))):
        return Nvfp4(int(count or 0))
    for each in ENCODINGS:
        if each.type == wanted and not count:
            return each
    known = ", ".join(each.label for each in (*ENCODINGS, Nvfp4()))
    raise StoreError(f"no kernel takes GGUF blocks of type {wanted.upper()!r}: choose a file of {known}")
