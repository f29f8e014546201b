"""2 bits within the 16 levels of 4 bits: which four levels a few weights use, and how they become 4-bit codes again.

A group of 4-bit weights has 16 levels, (n - 8) * scale + zero for n = 0..15. At 2 bits the group's columns are dealt
out to stripes of 8: with W = group / 8, stripe q holds the columns q, q + W, …, q + 7 W of the group, one in each
eighth of it. A stripe uses four of the levels, its ladder. So a weight costs 2 bits and a ladder 4, the slot is that
of 4 bits, and 8 weights have a range of their own as if in a group of 8.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tiermoe import native
from tiermoe.quant.quantized import Ladder
from tiermoe.quant.scratch import scratch

STRIPE = 8
LARGEST = 3
LEAST_STEP = 2
BLOCK_WEIGHTS = 1 << 17  # weights solved at a time: their float32 temporaries stay in the cache


def choose(weight: Tensor, scale: Tensor, zero: Tensor, ladders: Sequence[Ladder]) -> tuple[Tensor, Tensor]:
    """The ladder of each stripe of `weight` (N, K), and the codes 0..3 on it; `scale` and `zero` are (N, G).

    The ladder of `ladders` with the smallest sum of squared errors, the first where several have it; the nearest of
    its levels. Returns codes uint8 (N, K) and ladders uint8 (N, K / 8) as `packed` by `Ladder`, group by group."""
    rows, columns = weight.shape
    groups = scale.shape[1]
    width = columns // groups // STRIPE
    scale, zero = scale.float()[..., None, None], zero.float()[..., None, None]
    divisor = torch.where(scale == 0, torch.inf, scale)
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    chosen = torch.empty(rows, columns // STRIPE, dtype=torch.uint8)
    block = rows_together(columns)
    for first in range(0, rows, block):
        part = slice(first, first + block)
        levels = weight[part].float().reshape(-1, groups, STRIPE, width)
        levels = torch.sub(levels, zero[part]).div_(divisor[part]).add_(8)
        # what is one number per stripe is then contiguous
        part_codes, part_chosen = _choose(levels.movedim(2, 0).reshape(STRIPE, -1), ladders)
        codes[part].view(-1, groups, STRIPE, width).copy_(part_codes.view(STRIPE, -1, groups, width).movedim(0, 2))
        chosen[part].view(-1).copy_(part_chosen)
    return codes, chosen


def rows_together(columns: int) -> int:
    """Rows of so many columns whose ladders are chosen together."""
    return max(1, BLOCK_WEIGHTS // columns)


def _choose(levels: Tensor, ladders: Sequence[Ladder]) -> tuple[Tensor, Tensor]:
    """Codes (8, n) and packed ladders (n) of stripes (8, n) in units of the level."""
    best = torch.full_like(levels[0], torch.inf)
    step, offset, chosen = torch.zeros_like(best), torch.zeros_like(best), torch.zeros_like(best, dtype=torch.uint8)
    for ladder in ladders:
        error = levels - ladder.offset
        error.sub_(_nearest(error, ladder.step), alpha=ladder.step)
        size = error.square_().sum(dim=0)
        better = size < best
        best = torch.where(better, size, best)
        step.masked_fill_(better, ladder.step)
        offset.masked_fill_(better, ladder.offset)
        chosen.masked_fill_(better, ladder.packed)
    return _nearest(levels - offset, step).to(torch.uint8), chosen


def _nearest(above: Tensor, step: Tensor | int) -> Tensor:
    return torch.div(above, step).round_().clamp_(0, LARGEST)


def pair(codes: Tensor, groups: int) -> Tensor:
    """Codes 0..3 (N, K) two to a nibble: uint8 (N, G, 4, K / G / 8). Nibble (g, i, q) has column i W + q of group g
    in its low bits, and column (i + 4) W + q in its high ones."""
    eighths = codes.view(len(codes), groups, STRIPE, -1)
    return eighths[:, :, :4] | eighths[:, :, 4:] << 2


def widen(pairs: Tensor, ladders: Tensor, target: Tensor) -> None:
    """Two 4-bit codes a byte from two pairs and two packed ladders a byte, in the same order of nibbles: `pairs`
    (n, 4, R) and `ladders` (n, 1, R) → `target` (n, 8, R), all uint8.

    A level is step * code + (5 - step) * place, from 0 to 15: neither product carries into the byte's other nibble.
    Natively where that is possible, else in numpy; both stay in the calling thread: reading lanes widen while all
    compute threads are busy, and torch's would wait for each other (2-bit experts came 10 ms apart on two cores, 1.2 ms
    so)."""
    if native.available() and all(tensor.is_contiguous() for tensor in (pairs, ladders, target)):
        count, _, run = pairs.shape
        native.widen(pairs.data_ptr(), ladders.data_ptr(), count, run, target.data_ptr())
        return
    chosen, source, into = ladders.numpy(), pairs.numpy(), target.numpy()
    low, high, rest, offset, other = (_scratch(name, chosen.shape) for name in _NAMES)
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
    codes, shifted = (_scratch(name, source.shape) for name in ("pair_codes", "shifted"))
    np.right_shift(source, 2, out=shifted)
    for half, eighths in ((source, into[:, :4]), (shifted, into[:, 4:])):
        np.bitwise_and(half, 0x03, out=codes)
        np.multiply(codes, low, out=codes)
        np.add(codes, offset, out=eighths)
        np.bitwise_and(half, 0x30, out=codes)
        np.multiply(codes, high, out=codes)
        np.add(eighths, codes, out=eighths)


def _scratch(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return scratch.take(name, shape, torch.uint8).numpy()


_NAMES = ("ladder_low", "ladder_high", "ladder_rest", "ladder_offset", "ladder_other")
