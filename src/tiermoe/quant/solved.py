"""Codes that were found with a matrix's inputs known (`quant.gptq`), on their way into an encoding."""

from __future__ import annotations

import torch
from torch import Tensor

from tiermoe.quant.encoding import Encoding
from tiermoe.quant.gptq import EvenLevels, LadderLevels, Levels, Solution, UnevenLevels
from tiermoe.quant.int2 import Int2, RowMajorInt2
from tiermoe.quant.int4 import Int4
from tiermoe.quant.quantized import Grid, Quantized, nearest_codes
from tiermoe.quant.quantizers import GPTQ, LADDERS
from tiermoe.quant.rowmajor import RowMajorInt4
from tiermoe.quant.uneven import Uneven


def levels_of(encoding: Encoding | None, dtype: torch.dtype) -> Levels | None:
    """What weights may become in an encoding for kernels that compute in `dtype`; None where it is not solved."""
    match encoding:
        case Int4() | RowMajorInt4():
            return EvenLevels(encoding.group, dtype)
        case Int2() | RowMajorInt2():
            return LadderLevels(encoding.group, dtype)
        case Uneven():
            return UnevenLevels(encoding.bits, encoding.group)
    return None


class Solved:
    """`Quantizer` of the values that a solution found: its scales and zeros, for which they are levels."""

    name = GPTQ

    def __init__(self, solution: Solution) -> None:
        self._solution = solution
        self.scale = solution.scale
        # float64: the encodings' sums give the zeros back as they were
        self._offset = solution.zero.double() - 8 * solution.scale.double()

    def rows(self, first: int, last: int) -> tuple[Tensor, Solved]:
        """Values of the rows first..last - 1, float32, and their quantizer."""
        part = slice(first, last)
        values, scale, zero = self._solution
        return values[part], Solved(Solution(values[part], scale[part], zero[part]))

    def __call__(self, weight: Tensor, bits: int, group: int) -> Quantized:
        offset = self._offset.float()
        return Quantized(nearest_codes(weight, self.scale, offset, 0, (1 << bits) - 1, torch.uint8), self.scale, offset)

    def parameters(self, weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
        return self.scale, self._offset

    def rows_apart(self, columns: int) -> int:
        return 1

    def grid(self, weight: Tensor, group: int) -> Grid:
        return Grid(self.scale, self._solution.zero, LADDERS)
