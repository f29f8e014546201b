# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
# ruff: noqa: RUF005
# (as in triton_kernels.py)
"""Codes of packed matrices as Triton's kernels read them: units, their levels and scales, and which rows they are of.

A block of 64 rows is one run of bytes. Its unit is what few columns are packed in: planes of 32 bytes, eight words of
32 bits, and the units of consecutive columns follow each other, so that a thread loads 16 bytes at a time and the
threads of a warp load what is contiguous. A word has eight rows of a column, its lanes (four rows, of a trellis); each
lane has a tensor of its own, and no code changes its thread. At 8 bits the rows lie one after the other, each with one
scale.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiermoe.formats import nonuniform, trellis

_FACTORS, _KEPT = tl.constexpr(trellis.FACTORS), tl.constexpr(trellis.KEPT)


@triton.jit
def _number(code, middle: tl.constexpr):
    """code - middle as fp32, of codes 0..2**23 - 1: as the last bits of 2**23 + code, which needs no conversion."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + middle)


@triton.jit
def _index(words, CODING: tl.constexpr, column: tl.constexpr, lane: tl.constexpr):
    """The index into the coding's levels of a unit's column, in a lane of its words."""
    if CODING == "NL4":
        index = words[0] >> 4 * lane & 15
    elif CODING == "NL2":
        index = words[0] >> 4 * lane + 2 * column & 3
    elif CODING == "NL3":
        if column < 3:
            index = words[column] >> 4 * lane & 7
        else:  # of the highest bits of the three planes' nibbles
            low = words[0] >> 4 * lane + 3 & 1
            index = low | words[1] >> 4 * lane + 2 & 2 | words[2] >> 4 * lane + 1 & 4
    else:  # TCQ2: the second word has the bytes before those of the first
        at: tl.constexpr = 8 * (column % 2 * 2 + column // 2)
        state = words[1] >> at & 255 | (words[0] >> at & 255) << 8
        index = (state & _KEPT[lane]) * _FACTORS[lane] >> 16 & 31
    return index


@triton.jit
def level_of(words, levels, CODING: tl.constexpr, column: tl.constexpr, lane: tl.constexpr):
    """The weight of a unit's column over its scale, fp32, in a lane of its words."""
    if CODING == "INT4":
        level = _number(words[0] >> 4 * lane & 15, 8)
    elif CODING == "INT2":
        level = _number(words[0] >> 4 * lane + 2 * column & 3, 2)
    elif CODING == "INT6":
        low = words[column] >> 4 * lane & 15
        high = words[4 + column // 2] >> 8 * (lane // 2) + 4 * (column % 2) + 2 - 2 * (lane % 2) & 3
        level = _number(low | high << 4, 32)
    else:
        level = tl.load(levels + _index(words, CODING, column, lane))
    return level


@triton.jit
def row_of(word, lane, CODING: tl.constexpr, ROWS: tl.constexpr):
    """The row of a block of so many rows in a lane of a word."""
    if CODING == "TCQ2":
        row = 16 * lane + word
    elif ROWS == 64:
        row = 4 * word + lane // 2 + 32 * (lane % 2)
    else:  # two rows after each other share a byte
        row = 8 * word + lane
    return row


@triton.jit
def join_all(parts, COUNT: tl.constexpr):
    """COUNT tensors of a shape in new minor dimensions, the first tensor at index 0: a power of two of them."""
    if COUNT == 1:
        joined = parts[0]
    else:
        pairs = ()
        for at in tl.static_range(COUNT // 2):
            pairs = pairs + (tl.join(parts[at], parts[at + COUNT // 2]),)
        joined = join_all(pairs, COUNT // 2)
    return joined


@triton.jit
def load_units(
    at, inside, CODING: tl.constexpr, PLANES: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """The planes of units that begin at the pointers `at` (U): tensors (U, WORDS) of 32 bits, 0 outside."""
    word = tl.arange(0, WORDS)
    mask = inside[:, None]
    if WORDS * LANES != ROWS:
        mask = mask & (word < ROWS // LANES)[None, :]
    first = tl.load(at[:, None] + word[None, :], mask=mask, other=0)
    if CODING == "TCQ2":
        planes = (first, tl.load(at[:, None] + ((word + 15) % 16)[None, :], mask=mask, other=0))
    else:
        planes = (first,)
        for plane in tl.static_range(1, PLANES):
            words = (plane * (ROWS // LANES) + word)[None, :]
            planes = planes + (tl.load(at[:, None] + words, mask=mask, other=0),)
    return planes


@triton.jit
def load_scales(
    codes, scales, block, group, row, mask, N, K,
    CODING: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Scale and zero, fp32, of rows of a block in groups; without zeros the scale twice. `mask`: where they are."""
    if CODING == "INT4" or CODING == "INT2":  # a pair is one load
        width: tl.constexpr = scales.dtype.element_ty.primitive_bitwidth
        half: tl.constexpr = tl.int16 if width == 16 else tl.int32
        both: tl.constexpr = tl.int32 if width == 16 else tl.int64
        start = scales.to(tl.pointer_type(both)) + block * 64
        pairs = tl.load(start + (group * N + row), mask=mask, other=0)
        scale = pairs.to(half).to(scales.dtype.element_ty, bitcast=True)
        zero = (pairs >> width).to(half).to(scales.dtype.element_ty, bitcast=True)
    else:
        groups = block * (K // GROUP)
        if CODING == "INT6" or CODING == "TCQ2":
            start, apart = scales + groups * 64, 64
        else:  # before the codes of its group
            start, apart = codes.to(tl.pointer_type(tl.bfloat16)) + groups * (RUN // 2), RUN // 2
        scale = tl.load(start + (group * apart + row), mask=mask, other=0)
        zero = scale
    return scale.to(tl.float32), zero.to(tl.float32)


@triton.jit
def int8_levels(codes, rows, k, N, K):
    """The codes of W[rows, k] as fp32, zero outside (N, K); the row's scale is applied to the sum."""
    inside = (rows < N)[:, None] & (k < K)[None, :]
    return tl.load(codes + rows[:, None] * K + k[None, :], mask=inside, other=0).to(tl.float32)


@triton.jit
def unit_levels(
    words, levels, CODING: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr, UNITS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """The levels of units as fp32 (UNITS * COLUMNS, WORDS * LANES): columns, and rows in the order of `row_of`."""
    columns = ()
    for column in tl.static_range(COLUMNS):
        lanes = ()
        for lane in tl.static_range(LANES):
            lanes = lanes + (level_of(words, levels, CODING, column, lane),)
        columns = columns + (tl.reshape(join_all(lanes, LANES), (UNITS, WORDS * LANES)),)
    whole = tl.reshape(join_all(columns, COLUMNS), (UNITS, WORDS * LANES, COLUMNS))
    return tl.reshape(tl.permute(whole, (0, 2, 1)), (UNITS * COLUMNS, WORDS * LANES))


class Unit(NamedTuple):
    """What a coding packs few columns of a block of 64 rows in."""

    columns: int
    planes: int  # of 32 bytes
    lanes: int = 8  # rows of a word
    head: int = 0  # bytes of a group's scales before its codes


UNITS = {
    "INT8": Unit(1, 1), "INT6": Unit(4, 6), "INT4": Unit(1, 1), "INT2": Unit(2, 1), "TCQ2": Unit(4, 2, lanes=4),
    "NL4": Unit(1, 1, head=128), "NL3": Unit(4, 3, head=128), "NL2": Unit(2, 1, head=128),
}  # fmt: skip
"""Coding (`formats.encoding.InC`) → its units. The fields are those of `Int8`, `Int6`, `Int4`, `Int2`, `Trellis` and
`NonUniform`; at 8 bits rows lie one after the other."""


@lru_cache
def levels_of(coding: str, device: torch.device) -> Tensor | None:
    """What the codes stand for, float32, where a table says so."""
    if coding == "TCQ2":
        return torch.tensor(trellis.LEVELS, dtype=torch.float32, device=device)
    if coding.startswith("NL"):
        return torch.tensor(nonuniform.LEVELS[int(coding[-1])], dtype=torch.float32, device=device)
    return None
