"""4 bits: a code for each weight, a scale and a zero for each group of a row, in the order of CPUs or of GPUs. 2 bits:
the same with the codes of two columns in a nibble; 2.5 bits a weight in groups of 64.

CPUs: blocks of 64 rows; within a block the column is the outer index, and two rows share a byte: rows j and 32 + j of a
full block, rows 2 j and 2 j + 1 of the last block where it has fewer than 64. torch's operator
``_weight_int4pack_mm_for_cpu`` takes this order where torch runs on AVX-512, hence its name; our own kernels take it on
every processor, and so does decoding.

GPUs: row by row, the format of the Triton kernels; readable on any device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tiermoe import native
from tiermoe.formats.encoding import Encoded, EncodedInC, Field, InC, SameInSlot, scratch
from tiermoe.formats.quantizers import Quantizer, uniform_codes, uniform_parameters

CPU_LAYOUT = "cpu-avx512"
"""The order of codes that CPUs take; a store packed in another one cannot be used on a CPU."""

ROW_MAJOR = "rowmajor"
"""The order of codes that GPUs take."""

ROWS = 16  # a matrix has a multiple of them
BLOCK_ROWS = 64
BLOCK_WEIGHTS = 1 << 20  # weights decoded at a time: bounds the temporaries to 6 bytes each


@dataclass(frozen=True)
class Int4(SameInSlot, EncodedInC):
    """4 bits for CPUs: w = (code - 8) * scale + zero, code 0..15.

    Fields: `codes` uint8 (N, K bits / 8) in the CPUs' order, `scales_and_zeros` (K / group, N, 2) in the compute
    dtype."""

    layout: str
    group: int
    bits: ClassVar[int] = 4
    kind: ClassVar[str] = "int4"

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.layout}/g{self.group}"

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
            codes = of_nibbles(nibbles, self.bits, 0).view(torch.int8).sub_(1 << self.bits - 1)
            groups = slice(first, first + step)
            # addcmul computes in float32 inside, whatever its operands' dtype: one rounding
            values = scratch.take("values", tuple(part.shape), dtype).copy_(codes.view_as(part))
            torch.addcmul(zero[groups], values, scale[groups], out=part)
        return weight.view(in_, out).t()

    def in_c(self, out: int, in_: int) -> InC | None:
        return InC(f"INT{self.bits}", self.group, "codes", "scales_and_zeros")


@dataclass(frozen=True)
class Int2(Int4):
    """2 bits for CPUs: w = (code - 2) * scale + zero, code 0..3; two columns share a nibble of the CPUs' order."""

    bits: ClassVar[int] = 2
    kind: ClassVar[str] = "u2"


@dataclass(frozen=True)
class RowMajorInt4(SameInSlot):
    """4 bits for GPUs: the very weights of Int4 under the same quantizer and group, in row order.

    Fields: `codes` uint8 (N, K bits / 8), `scale` and `zero` (N, K / group) in the compute dtype. Byte j of a row holds
    the code of column 2 j in its low nibble and that of column 2 j + 1 in its high one. w = (code - 8) * scale + zero,
    in float32 and rounded once to the compute dtype."""

    group: int
    bits: ClassVar[int] = 4
    kind: ClassVar[str] = "int4"

    @property
    def name(self) -> str:
        return f"{self.kind}/{ROW_MAJOR}/g{self.group}"

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        groups = in_ // self.group
        return (
            Field("codes", torch.uint8, (out, in_ * self.bits // 8)),
            Field("scale", dtype, (out, groups)),
            Field("zero", dtype, (out, groups)),
        )

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        scale, zero = uniform_parameters(weight, quantizer, self.bits, self.group, dtype)
        codes = uniform_codes(weight, scale, zero, self.bits)
        return {"codes": pack_nibbles(as_nibbles(codes, self.bits)), "scale": scale, "zero": zero}

    def row_multiple(self, columns: int, quantizer: Quantizer) -> int | None:
        return quantizer.row_multiple(columns)

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        codes = of_nibbles(unpack_nibbles(slot["codes"]), self.bits, 1).view(out, -1, self.group)
        values = codes.view(torch.int8).sub_(1 << self.bits - 1).to(dtype)
        scale, zero = (slot[name].to(dtype)[..., None] for name in ("scale", "zero"))
        # one rounding: addcmul computes in float32 inside, whatever its operands' dtype
        return torch.addcmul(zero, values, scale, out=values).view(out, in_)


@dataclass(frozen=True)
class RowMajorInt2(RowMajorInt4):
    """2 bits for GPUs: the very weights of Int2. Byte j of a row holds the codes of columns 4 j .. 4 j + 3, the first
    column's in its lowest bits."""

    bits: ClassVar[int] = 2
    kind: ClassVar[str] = "u2"


@dataclass(frozen=True)
class Section:
    """Blocks of equal size in the CPUs' order."""

    first: int  # row of the matrix
    blocks: int
    rows: int  # of a block
    split: bool  # byte j of a column holds rows j and rows / 2 + j; else rows 2 j and 2 j + 1


def is_torchs() -> bool:
    """Whether torch's operator takes the CPUs' order on this machine: it has one for each vector width."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def pack(codes: Tensor) -> Tensor:
    """Codes 0..15 (N, K), any integer dtype, N a multiple of 16, in the CPUs' order: uint8 (N, K / 2)."""
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


def of_nibbles(nibbles: Tensor, bits: int, columns_at: int) -> Tensor:
    """What `as_nibbles` joined; `columns_at`: the dimension of the columns."""
    if bits == 4:
        return nibbles
    shifts = nibbles.new_tensor([0, 2]).view(2, *(1,) * (nibbles.dim() - 1 - columns_at))
    codes = (nibbles.unsqueeze(columns_at + 1) >> shifts).bitwise_and_(3)
    return codes.flatten(columns_at, columns_at + 1)


def pack_nibbles(nibbles: Tensor) -> Tensor:
    """Values 0..15, uint8 (..., K), two to a byte: (..., K / 2), the even one in the low nibble."""
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    """What `pack_nibbles` packed: uint8 (..., K / 2) → (..., K)."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
