"""2 bits in a trellis: a weight's level follows from its own code and those before it.

Trellis-coded quantization (Marcellin and Fischer, "Trellis Coded Quantization of Memoryless and Gauss-Markov Sources",
1990) as a bitshift trellis that closes on itself (Tseng, Sun, Hou and De Sa, "QTIP: Quantization with Trellises and
Incoherence Processing", 2024). 64 weights of a column, one of each row of a block, are a run: its codes are chosen
together, by the Viterbi algorithm. The squared error of normal weights is two thirds of that of four levels.

A multiplication mixes the codes, so that a kernel needs no more than it and a look into 32 levels; native/trellis.h has
the same rule in C.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tiermoe import native
from tiermoe.formats.encoding import BLOCK_ROWS, ORDER, Field, InC, RowBlocks
from tiermoe.formats.int6 import by_block
from tiermoe.formats.quantizers import Quantizer, require_finite

LEVELS = (
    -31, -24, -20, -18, -16, -14, -12, -10, -9, -8, -6, -5, -4, -3, -2, -1,
    1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 14, 16, 18, 20, 24, 31,
)  # fmt: skip
"""What indices stand for, in units of the scale: equally frequent among normal weights."""

SPREAD = (sum(level * level for level in LEVELS) / len(LEVELS)) ** 0.5
"""The levels' root mean square: a group's weights over it are its scale."""

COLUMNS = 4  # a matrix has a multiple of them
GROUPS = (128, 64)
"""Columns that share a scale, in order of choice."""

FACTORS = (17 << 11, 117 << 9, 145 << 7, 1115 << 5)
KEPT = (0xFFFC, 0xFFFC, 0xFFC0, 0xFFC0)

_BYTES = BLOCK_ROWS // 4  # of a run
_AROUND = 4  # bytes before and behind the place where a run closes
_HISTORIES = 256
BLOCK_WEIGHTS = 1 << 18  # weights encoded at a time: bounds the float32 temporaries


@dataclass(frozen=True)
class Trellis(RowBlocks):
    """2 bits: w = level * scale.

    Fields: `codes` uint8 (N, K / 4), `scales` (N, K / group), in each block of 64 rows as (K / group, 64). A run has 16
    bytes; byte j has the codes of rows j, 16 + j, 32 + j and 48 + j of the block, from its lowest bits up. For row
    16 i + j the byte before j, of byte 0 the last one, is the low half of a word and byte j its high half; bits 16 to
    20 of (word & KEPT[i]) * FACTORS[i] are an index into `LEVELS`. The runs of four columns after each other fill 64
    bytes: byte j of the first, third, second and fourth column, for each j.

    A quantizer with `scale` (N, K / group) has found the scales, and the weights are levels under them that a run has
    (`formats.gptq.Solved`). Else scales follow from the weights' root mean squares, whatever `quantizer` is."""

    group: int
    bits: ClassVar[int] = 2

    @property
    def name(self) -> str:
        return f"tcq2/{ORDER}/g{self.group}"

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return Field("codes", torch.uint8, (out, in_ // 4)), Field("scales", dtype, (out, in_ // self.group))

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        rows, columns = weight.shape
        codes = torch.empty((rows, columns // 4), dtype=torch.uint8)
        found: Tensor | None = getattr(quantizer, "scale", None)
        scale = torch.empty((rows, columns // self.group)) if found is None else found
        step = max(1, BLOCK_WEIGHTS // (columns * BLOCK_ROWS)) * BLOCK_ROWS
        for first in range(0, rows, step):
            part = slice(first, first + step)
            weights = weight[part].float()
            if found is None:
                scale[part] = usual_scale(weights.reshape(len(weights), -1, self.group)).to(dtype)
            spread = scale[part].repeat_interleave(self.group, 1)
            units = weights * torch.where(spread == 0, 0.0, 1 / spread)
            counted = spread if found is None else spread.sign()
            of_runs, _ = nearest(_runs(units), _runs(counted.square()), exact=found is not None)
            blocks = of_runs.view(-1, columns // COLUMNS, 2, 2, _BYTES)
            codes[part] = blocks.permute(0, 1, 4, 3, 2).reshape(-1, columns // 4)
        require_finite(scale)
        return {"codes": codes, "scales": by_block(scale.to(dtype))}

    def decode_rows(
        self, slot: Mapping[str, Tensor], first: int, last: int, in_: int, dtype: torch.dtype, into: Tensor
    ) -> Tensor:
        rows, groups = last - first, in_ // self.group
        blocks = slot["codes"][first:last].view(-1, in_ // COLUMNS, _BYTES, 2, 2)
        levels = _decoded(blocks.permute(0, 1, 4, 3, 2).reshape(-1, in_, _BYTES))
        weight = into.view(groups, self.group, rows)
        weight.copy_(levels.transpose(0, 1).reshape(weight.shape))
        scales = slot["scales"][first:last].view(-1, groups, BLOCK_ROWS)
        # one rounding where the scales are of this dtype: levels are exact in it
        weight.mul_(scales.movedim(1, 0).reshape(groups, 1, rows).to(dtype))
        return weight.view(in_, rows).t()

    def in_c(self, out: int, in_: int) -> InC | None:
        return InC("TCQ2", self.group, "codes", "scales")


def usual_scale(groups: Tensor) -> Tensor:
    """The scales (...) of groups of weights (..., group) as they mostly fit, from the weights' root mean squares."""
    return groups.square().mean(-1).sqrt().div_(SPREAD)


def nearest(targets: Tensor, weights: Tensor, exact: bool = False) -> tuple[Tensor, Tensor]:
    """Codes uint8 (S, 16) and levels float32 (S, 64) of runs of targets in units of their scales, by squares of errors
    that count by `weights`; both float32 (S, 64). exact: targets of weights above 0 are levels that a run has, and get
    those very levels. Natively where that is possible, else in torch."""
    # as shares of the largest: squares of small scales would vanish
    weights = weights / weights.amax(1, keepdim=True).clamp_min(1e-30)
    if native.quantizes():
        return native.trellis(targets.contiguous(), weights.contiguous(), exact)
    around = torch.arange(-4 * _AROUND, 4 * _AROUND)
    closing = _best(targets, weights, around % BLOCK_ROWS, None)[:, 4 * _AROUND - 1] % _HISTORIES
    codes = _bytes(_best(targets, weights, torch.arange(BLOCK_ROWS), closing))
    for history in range(_HISTORIES if exact else 0):
        wrong = ((_decoded(codes) - targets).abs() > 0.25).logical_and_(weights > 0).any(1)
        if not wrong.any():
            break
        some = torch.full((int(wrong.sum()),), history)
        codes[wrong] = _bytes(_best(targets[wrong], weights[wrong], torch.arange(BLOCK_ROWS), some))
    return codes, _decoded(codes)


def _runs(matrix: Tensor) -> Tensor:
    """Of a matrix (N, K): the 64 rows of each block and column, (N / 64 * K, 64)."""
    return matrix.view(-1, BLOCK_ROWS, matrix.shape[1]).transpose(1, 2).reshape(-1, BLOCK_ROWS)


def _decoded(runs: Tensor) -> Tensor:
    """The levels, float32 (..., 64), of the bytes of runs (..., 16)."""
    words = (runs.roll(1, -1).int() | runs.int() << 8).unsqueeze(-2)
    factors, kept = (torch.tensor(each).view(-1, 1) for each in (FACTORS, KEPT))
    index = (words & kept).long() * factors >> 16 & len(LEVELS) - 1
    return torch.tensor(LEVELS, dtype=torch.float32)[index].flatten(-2)


def _bytes(states: Tensor) -> Tensor:
    """The bytes (S, 16) of states (S, 64) along runs."""
    codes = (states % 4).view(-1, _BYTES, 4) << torch.tensor([0, 2, 4, 6])
    return codes.sum(-1).to(torch.uint8)


def _best(targets: Tensor, weights: Tensor, positions: Tensor, closing: Tensor | None) -> Tensor:
    """The states (S, P) of least error at positions (P) along runs: the last five codes, the newest in the lowest bits.
    closing (S): the four codes before the first position, which are to be the last ones; None: any."""
    states = torch.arange(4 * _HISTORIES)
    costs, came = torch.zeros(len(targets), len(states)), []
    if closing is not None:
        costs.masked_fill_(states % _HISTORIES != closing[:, None], torch.inf)
    first = costs
    for position in positions.tolist():
        i, row = position % 4, position % 4 * _BYTES + position // 4
        least, by = costs.view(-1, 4, _HISTORIES).min(1)  # by the code that is forgotten
        came.append(by)
        words = sum((states >> 2 * k & 3) << 2 * (4 + i - k) for k in range(5)) & KEPT[i]
        level = torch.tensor(LEVELS, dtype=torch.float32)[words * FACTORS[i] >> 16 & len(LEVELS) - 1]
        costs = least.repeat_interleave(4, 1) + weights[:, row, None] * (targets[:, row, None] - level).square()
    found = [(costs + first).argmin(1) if closing is not None else costs.argmin(1)]
    for by in reversed(came[1:]):
        history = found[-1] // 4
        found.append(history + by.gather(1, history[:, None])[:, 0] * _HISTORIES)
    return torch.stack(found[::-1], 1)
