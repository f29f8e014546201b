"""2 bits within the 16 levels of 4 bits: 3 bits a weight at group 64, 2 of code, half a bit of level subset, half a bit
of scale and zero.

A group of 4-bit weights has 16 levels, (n - 8) * scale + zero for n = 0..15. At 2 bits the group's columns are dealt
out to stripes of 8: with W = group / 8, stripe q has the columns q, q + W, …, q + 7 W of the group, one in each eighth
of it. A stripe uses four of the levels, a `LevelSubset`. So a weight costs 2 bits and a subset 4, the slot is that of 4
bits, and 8 weights have a range of their own as if in a group of 8.

A slot has the fields as they are stored. A CPU's kernels widen a block of rows to 4 bits where they compute with it, a
GPU's kernels each tile. The fields `ladders` hold the subsets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from tiermoe import native
from tiermoe.formats import int4
from tiermoe.formats.encoding import Field, SameInSlot
from tiermoe.formats.int4 import ROW_MAJOR, Int4, on_scale, pack_nibbles, unpack_nibbles
from tiermoe.formats.quantizers import LevelSubset, Quantizer
from tiermoe.formats.scratch import scratch

STRIPE = 8
LARGEST = 3
LEAST_STEP = 2

BLOCK_WEIGHTS = 1 << 20  # weights widened at a time: bounds the temporaries to about a byte each
CHOSEN_WEIGHTS = 1 << 17  # weights whose subsets are chosen at a time: their float32 temporaries stay in the cache
LEVELS_AT_ONCE = 1 << 18  # weights: their levels and the steps to them take 6 to 9 bytes each


@dataclass(frozen=True)
class Int2(SameInSlot):
    """2 bits for CPUs.

    Fields: `codes` uint8 (N, K / 4), `ladders` uint8 (N, K / 16), and Int4's `scales_and_zeros` (K / group, N, 2).
    `codes` are the nibbles of `pair_codes` and `ladders` the packed subsets, each in the CPUs' order for a matrix of
    K / 2 and K / 8 columns: widened nibbles then stand as those of Int4 do."""

    layout: str
    group: int
    bits: ClassVar[int] = 2

    @property
    def name(self) -> str:
        return f"int2/{self.layout}/g{self.group}"

    @property
    def widened(self) -> Int4:
        """The encoding that `widen_codes` gives."""
        return Int4(self.layout, self.group)

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (
            Field("codes", torch.uint8, (out, in_ // 4)),
            Field("ladders", torch.uint8, (out, in_ // 16)),
            Field("scales_and_zeros", dtype, (in_ // self.group, out, 2), rows_at=1),
        )

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        scale, zero, pairs, subsets = _quantize(weight, quantizer, dtype, self.group)
        return {
            "codes": int4.pack(pairs.flatten(1)),
            "ladders": int4.pack(subsets),
            "scales_and_zeros": torch.stack((scale.t(), zero.t()), dim=-1).contiguous(),
        }

    def row_multiple(self, columns: int, quantizer: Quantizer) -> int | None:
        return self.widened.row_multiple(columns, quantizer)

    def widen_codes(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same weights in the fields of Int4; the codes are in a scratch buffer that the next call uses again."""
        stored, groups = fields["codes"], len(fields["scales_and_zeros"])
        widened = scratch.take("widened", (len(stored), 2 * stored.shape[1]), torch.uint8)
        for section in int4.sections(len(stored)):
            part = slice(section.first, section.first + section.blocks * section.rows)
            count = section.blocks * groups
            codes = stored[part].view(count, 4, -1)
            subsets = fields["ladders"][part].view(count, 1, -1)
            target = widened[part].view(count, 8, -1)
            block = max(1, BLOCK_WEIGHTS // (self.group * section.rows))
            for first in range(0, count, block):
                some = slice(first, first + block)
                widen(codes[some], subsets[some], target[some])
        return {"codes": widened, "scales_and_zeros": fields["scales_and_zeros"]}

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        return self.widened.decode(self.widen_codes(slot), out, in_, dtype)


@dataclass(frozen=True)
class RowMajorInt2(SameInSlot):
    """2 bits for GPUs: the very weights of Int2.

    Fields: `codes` uint8 (4, N, K / 16), `ladders` uint8 (N, K / 16), `scale` and `zero` (N, K / group) as RowMajorInt4
    has them. Byte j of `codes[i, n]` holds nibbles 2 j (low) and 2 j + 1 of the row's (g, i, q), g before q (see
    `pair_codes`); byte j of a row of `ladders` those of (g, q). The four eighths of a row are apart, so that each is
    one run beside the subsets."""

    group: int
    bits: ClassVar[int] = 2

    @property
    def name(self) -> str:
        return f"int2/{ROW_MAJOR}/g{self.group}"

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        groups = in_ // self.group
        return (
            Field("codes", torch.uint8, (4, out, in_ // 16), rows_at=1),
            Field("ladders", torch.uint8, (out, in_ // 16)),
            Field("scale", dtype, (out, groups)),
            Field("zero", dtype, (out, groups)),
        )

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        scale, zero, pairs, subsets = _quantize(weight, quantizer, dtype, self.group)
        codes = pack_nibbles(pairs.movedim(2, 0).flatten(2)).contiguous()
        return {"codes": codes, "ladders": pack_nibbles(subsets), "scale": scale, "zero": zero}

    def row_multiple(self, columns: int, quantizer: Quantizer) -> int | None:
        return quantizer.row_multiple(columns)

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        result = torch.empty(out, in_, dtype=dtype, device=slot["scale"].device)
        for first in range(0, out, block := max(1, LEVELS_AT_ONCE // in_)):
            part = slice(first, first + block)
            values = on_scale(self._levels(slot, part), slot["scale"][part], slot["zero"][part], dtype)
            result[part] = values.view(-1, in_)
        return result

    def _levels(self, slot: Mapping[str, Tensor], rows: slice) -> Tensor:
        """The levels 0..15 of the weights of some rows, uint8 (rows, groups, group)."""
        groups, width = slot["scale"].shape[1], self.group // STRIPE
        pairs = unpack_nibbles(slot["codes"][:, rows]).view(4, -1, groups, width)
        subsets = unpack_nibbles(slot["ladders"][rows]).view(-1, groups, width)
        codes = torch.cat((pairs & 3, pairs >> 2)).movedim(0, 2)
        low, place = (each[:, :, None] for each in (subsets & 3, subsets >> 2))
        return (codes * (low + LEAST_STEP) + (3 - low) * place).flatten(2)


def _quantize(
    weight: Tensor, quantizer: Quantizer, dtype: torch.dtype, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scales and zeros (N, G) in `dtype`, pairs (N, G, 4, group / 8) and packed subsets (N, K / 8)."""
    grid = quantizer.grid(weight, group)
    scale, zero = grid.scale.to(dtype), grid.zero.to(dtype)
    # for the scales and zeros as stored, so that their rounding to `dtype` costs next to nothing
    codes, subsets = choose(weight, scale, zero, grid.subsets)
    return scale, zero, pair_codes(codes, scale.shape[1]), subsets


def choose(weight: Tensor, scale: Tensor, zero: Tensor, subsets: Sequence[LevelSubset]) -> tuple[Tensor, Tensor]:
    """The subset of each stripe of `weight` (N, K), and the codes 0..3 within it; `scale` and `zero` are (N, G).

    The subset with the smallest sum of squared errors, the first where several have it; the nearest of its levels.
    Returns codes uint8 (N, K) and packed subsets uint8 (N, K / 8), group by group."""
    rows, columns = weight.shape
    groups = scale.shape[1]
    width = columns // groups // STRIPE
    scale, zero = scale.float()[..., None, None], zero.float()[..., None, None]
    divisor = torch.where(scale == 0, torch.inf, scale)
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    chosen = torch.empty(rows, columns // STRIPE, dtype=torch.uint8)
    block = rows_chosen_together(columns)
    for first in range(0, rows, block):
        part = slice(first, first + block)
        levels = weight[part].float().reshape(-1, groups, STRIPE, width)
        levels = torch.sub(levels, zero[part]).div_(divisor[part]).add_(8)
        # what is one number per stripe is then contiguous
        part_codes, part_chosen = _choose(levels.movedim(2, 0).reshape(STRIPE, -1), subsets)
        codes[part].view(-1, groups, STRIPE, width).copy_(part_codes.view(STRIPE, -1, groups, width).movedim(0, 2))
        chosen[part].view(-1).copy_(part_chosen)
    return codes, chosen


def rows_chosen_together(columns: int) -> int:
    """Rows of so many columns that choose their subsets at a time."""
    return max(1, CHOSEN_WEIGHTS // columns)


def _choose(levels: Tensor, subsets: Sequence[LevelSubset]) -> tuple[Tensor, Tensor]:
    """Codes (8, n) and packed subsets (n) of stripes (8, n) in units of the level."""
    best = torch.full_like(levels[0], torch.inf)
    step, offset, chosen = torch.zeros_like(best), torch.zeros_like(best), torch.zeros_like(best, dtype=torch.uint8)
    for subset in subsets:
        error = levels - subset.offset
        error.sub_(_nearest(error, subset.step), alpha=subset.step)
        size = error.square_().sum(dim=0)
        better = size < best
        best = torch.where(better, size, best)
        step.masked_fill_(better, subset.step)
        offset.masked_fill_(better, subset.offset)
        chosen.masked_fill_(better, subset.packed)
    return _nearest(levels - offset, step).to(torch.uint8), chosen


def _nearest(above: Tensor, step: Tensor | int) -> Tensor:
    return torch.div(above, step).round_().clamp_(0, LARGEST)


def pair_codes(codes: Tensor, groups: int) -> Tensor:
    """Codes 0..3 (N, K) two to a nibble: uint8 (N, G, 4, K / G / 8). Nibble (g, i, q) has column i W + q of group g in
    its low bits, and column (i + 4) W + q in its high bits."""
    eighths = codes.view(len(codes), groups, STRIPE, -1)
    return eighths[:, :, :4] | eighths[:, :, 4:] << 2


def widen(pairs: Tensor, subsets: Tensor, target: Tensor) -> None:
    """Two 4-bit codes a byte from two pairs and two packed subsets a byte, in the same order of nibbles: `pairs`
    (n, 4, R) and `subsets` (n, 1, R) → `target` (n, 8, R), all uint8.

    A level is step * code + (5 - step) * place, from 0 to 15: neither product carries into the byte's other nibble.
    Natively where that is possible, else in numpy. Both stay in the calling thread: threads that read from the drive
    widen while all compute threads are busy, and torch's would wait for each other (2-bit experts came 10 ms apart on
    two cores, 1.2 ms so)."""
    if native.available() and all(tensor.is_contiguous() for tensor in (pairs, subsets, target)):
        count, _, run = pairs.shape
        native.widen(pairs.data_ptr(), subsets.data_ptr(), count, run, target.data_ptr())
        return
    chosen, source, into = subsets.numpy(), pairs.numpy(), target.numpy()
    names = ("low", "high", "rest", "offset", "other")
    low, high, rest, offset, other = (_buffer(name, chosen.shape) for name in names)
    np.right_shift(chosen, 2, out=offset)
    np.bitwise_and(chosen, 3, out=low)
    np.bitwise_and(offset, 3, out=other)
    np.bitwise_xor(low, 3, out=rest)
    np.multiply(other, rest, out=other)
    np.right_shift(chosen, 4, out=high)
    np.bitwise_and(high, 3, out=high)
    np.bitwise_and(offset, 0x30, out=offset)
    np.bitwise_xor(high, 3, out=rest)
    np.multiply(offset, rest, out=offset)
    np.add(offset, other, out=offset)
    np.add(low, LEAST_STEP, out=low)
    np.add(high, LEAST_STEP, out=high)
    codes, shifted = (_buffer(name, source.shape) for name in ("codes", "shifted"))
    np.right_shift(source, 2, out=shifted)
    for half, eighths in ((source, into[:, :4]), (shifted, into[:, 4:])):
        np.bitwise_and(half, 0x03, out=codes)
        np.multiply(codes, low, out=codes)
        np.add(codes, offset, out=eighths)
        np.bitwise_and(half, 0x30, out=codes)
        np.multiply(codes, high, out=codes)
        np.add(eighths, codes, out=eighths)


def _buffer(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return scratch.take(f"widen {name}", shape, torch.uint8).numpy()
