"""4 bits: a code for each weight, a scale and a zero for each group of a row. 2 bits: the same with the codes of two
columns in a nibble; 2.5 bits a weight in groups of 64.

Blocks of 64 rows; within a block the column is the outer index, and two rows share a byte: rows j and 32 + j of a full
block, rows 2 j and 2 j + 1 of the last block where it has fewer than 64. torch's operator
``_weight_int4pack_mm_for_cpu`` takes this order where torch runs on AVX-512; our own kernels take it on every processor
and on GPUs, and so does decoding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tiermoe import native
from tiermoe.formats.encoding import BLOCK_ROWS, ORDER, Encoded, EncodedInC, Field, InC, SameInSlot, scratch
from tiermoe.formats.quantizers import Quantizer, uniform_codes, uniform_parameters

ROWS = 16  # a matrix has a multiple of them
BLOCK_WEIGHTS = 1 << 20  # weights decoded at a time: bounds the temporaries to 6 bytes each


@dataclass(frozen=True)
class Int4(SameInSlot, EncodedInC):
    """4 bits: w = (code - 8) * scale + zero, code 0..15.

    Fields: `codes` uint8 (N, K bits / 8) in the order above, `scales_and_zeros` (K / group, N, 2) in the compute
    dtype."""

    group: int
    bits: ClassVar[int] = 4
    kind: ClassVar[str] = "int4"

    @property
    def name(self) -> str:
        return f"{self.kind}/{ORDER}/g{self.group}"

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (
            Field("codes", torch.uint8, (out, in_ * self.bits // 8)),
            Field("scales_and_zeros", dtype, (in_ // self.group, out, 2), rows_at=1),
        )

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        scale, zero = uniform_parameters(weight, quantizer, self.bits, self.group, dtype)
        codes = uniform_codes(weight, scale, zero, self.bits)
        pairs = torch.stack((scale.t(), zero.t()), dim=-1).contiguous()
        return {"codes": pack(as_nibbles(codes, self.bits)), "scales_and_zeros": pairs}

    def encode_in_c(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> Encoded:
        rows, columns = weight.shape
        scale, zero = uniform_parameters(weight, quantizer, self.bits, self.group, dtype)
        codes = scratch.take("packed codes", (rows, columns * self.bits // 8), torch.uint8)
        coding = f"INT{self.bits}"
        squares = native.encode(coding, weight, self.group, dtype, scale.float(), zero.float(), codes)
        return {"codes": codes, "scales_and_zeros": torch.stack((scale.t(), zero.t()), dim=-1).contiguous()}, squares

    def row_multiple(self, columns: int, quantizer: Quantizer) -> int | None:
        return math.lcm(BLOCK_ROWS, quantizer.row_multiple(columns))

    def decode(
        self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        """As `Encoding.decode`. `into`: a buffer of out * in_ values of `dtype` for the result."""
        into = torch.empty(out * in_, dtype=dtype) if into is None else into
        weight = into.view(in_ // self.group, self.group, out)
        # contiguous: with pairs as operands addcmul is seven times slower
        scale, zero = slot["scales_and_zeros"].to(dtype).movedim(-1, 0).contiguous().unsqueeze(2)
        step = max(1, BLOCK_WEIGHTS // (self.group * out))
        for first in range(0, len(weight), step):
            part = weight[first : first + step]
            columns = (first * self.group, (first + len(part)) * self.group)
            nibbles = unpack_transposed(slot["codes"], *(column * self.bits // 4 for column in columns))
            codes = of_nibbles(nibbles, self.bits).view(torch.int8).sub_(1 << self.bits - 1)
            groups = slice(first, first + step)
            # addcmul computes in float32 inside, whatever its operands' dtype: one rounding
            values = scratch.take("values", tuple(part.shape), dtype).copy_(codes.view_as(part))
            torch.addcmul(zero[groups], values, scale[groups], out=part)
        return weight.view(in_, out).t()

    def in_c(self, out: int, in_: int) -> InC | None:
        return InC(f"INT{self.bits}", self.group, "codes", "scales_and_zeros")


@dataclass(frozen=True)
class Int2(Int4):
    """2 bits: w = (code - 2) * scale + zero, code 0..3; two columns share a nibble."""

    bits: ClassVar[int] = 2
    kind: ClassVar[str] = "u2"


@dataclass(frozen=True)
class Section:
    """Blocks of equal size."""

    first: int  # row of the matrix
    blocks: int
    rows: int  # of a block
    split: bool  # byte j of a column holds rows j and rows / 2 + j; else rows 2 j and 2 j + 1


def is_torchs() -> bool:
    """Whether torch's operator takes this order on this machine: it has one for each vector width."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def pack(codes: Tensor) -> Tensor:
    """Codes 0..15 (N, K), any integer dtype, N a multiple of 16, in the order above: uint8 (N, K / 2)."""
    rows, columns = codes.shape
    packed = torch.empty((rows, columns // 2), dtype=torch.uint8)
    for section in sections(rows):
        end = section.first + section.blocks * section.rows
        half = section.rows // 2
        source = codes[section.first : end].to(torch.uint8).view(section.blocks, section.rows, columns)
        low, high = (source[:, :half], source[:, half:]) if section.split else (source[:, ::2], source[:, 1::2])
        packed[section.first : end].view(section.blocks, columns, half).copy_((low | high << 4).transpose(1, 2))
    return packed


def unpack_transposed(packed: Tensor, first: int, last: int) -> Tensor:
    """The codes of the columns first..last - 1, from packed ones (N, K / 2): uint8 (last - first, N), in a scratch
    buffer that the next call uses again."""
    rows, columns = packed.shape[0], packed.shape[1] * 2
    codes = scratch.take("codes", (last - first, rows), torch.uint8)
    for section in sections(rows):
        end = section.first + section.blocks * section.rows
        half = section.rows // 2
        source = packed[section.first : end].view(section.blocks, columns, half)[:, first:last]
        pairs, low, high = (scratch.take(name, tuple(source.shape), torch.uint8) for name in ("pairs", "low", "high"))
        pairs.copy_(source)
        torch.bitwise_and(pairs, 15, out=low)
        torch.bitwise_right_shift(pairs, 4, out=high)
        target = codes[:, section.first : end]
        if section.split:  # runs of `half` rows, a multiple of 8: moved as words
            words = target.view(torch.int64).view(last - first, section.blocks, 2, half // 8)
            words[:, :, 0].copy_(low.view(torch.int64).transpose(0, 1))
            words[:, :, 1].copy_(high.view(torch.int64).transpose(0, 1))
        else:
            nibbles = target.view(last - first, section.blocks, half, 2)
            nibbles[..., 0].copy_(low.transpose(0, 1))
            nibbles[..., 1].copy_(high.transpose(0, 1))
    return codes


def sections(rows: int) -> tuple[Section, ...]:
    """Full blocks, then the rest of the rows as one block."""
    full, rest = divmod(rows, BLOCK_ROWS)
    found = [Section(0, full, BLOCK_ROWS, True)] if full else []
    return (*found, Section(full * BLOCK_ROWS, 1, rest, False)) if rest else tuple(found)


def as_nibbles(codes: Tensor, bits: int) -> Tensor:
    """Codes of 4 or 2 bits, uint8 (N, K), as nibbles (N, K bits / 4): at 2 bits two columns share one, the first column
    in its low bits."""
    return codes if bits == 4 else codes[:, ::2] | codes[:, 1::2] << 2


def of_nibbles(nibbles: Tensor, bits: int) -> Tensor:
    """What `as_nibbles` joined, transposed: nibbles (K bits / 4, N), codes (K, N)."""
    return nibbles if bits == 4 else torch.stack((nibbles & 3, nibbles >> 2), dim=1).flatten(0, 1)
