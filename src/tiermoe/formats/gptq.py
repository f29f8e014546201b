"""GPTQ: codes with errors that cancel out on a matrix's inputs.

Frantar, Ashkboos, Hoefler and Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2023. With D what the codes change of the weights and H the inputs' second moments, the outputs change by
tr(D H D'). Columns are rounded one after the other, and the error of each is handed on to those that are still to come,
by the Cholesky factor of H's inverse.

Beside the paper: a group's scale is searched for when its turn comes, by errors weighted as they are going to count.
Groups, and the columns in a group, are treated by falling second moment, which nothing has to store. At the end scales
and zeros are solved for together by least squares, and every code is chosen again with all others fixed: both only
lower the change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tiermoe.errors import PackError
from tiermoe.formats import nonuniform, trellis
from tiermoe.formats.encoding import BLOCK_ROWS, Encoding
from tiermoe.formats.int4 import Int4
from tiermoe.formats.nonuniform import NonUniform
from tiermoe.formats.trellis import Trellis

DAMPING = 0.05  # of the mean second moment, added to each
ROUNDS = 2  # of least squares and new codes
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of a group's ends, tried for each
_FITS = 2  # steps of least squares of a group's scale alone
_ROWS = 128  # rows whose scales are solved for together: bounds the temporaries
ROWS_TOGETHER = 1024  # rows that are worked through together: bounds the copies of them
_COPIES, _SQUARES = 12, 6  # matrices of such rows, and of moments, that exist at a time at the most
SECONDS_A_WEIGHT = 1.5e-6  # of a core, measured on a Zen 3 (notebook/2026-11-22-codes.md)
_RIDGE = 1e-6  # of the mean: keeps scales where they are that the codes say nothing of


class Solution(NamedTuple):
    """A solved matrix (N, K) in groups of K / G weights: levels * scale + zero."""

    values: Tensor  # float32 (N, K)
    scale: Tensor  # float32 (N, G), as the store's dtype has it
    zero: Tensor  # float32 (N, G), likewise


class Levels(Protocol):
    """The possible values of a weight: level * scale + zero, with scale and zero in `dtype`."""

    group: int
    zeros: bool  # whether zeros may differ from 0
    dtype: torch.dtype

    searched: bool  # whether the best of the candidates is searched for; else there is one

    def candidates(self, block: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Scales and zeros (N) to try for a group (N, group)."""

    def nearest(self, units: Tensor, scale: Tensor, before: Tensor | None = None) -> Tensor:
        """The level nearest to each of `units` (..., N), values in units of the scale (N) from the zero. Where levels
        are chosen together, those `before` are kept that are nearer together."""


class Place(NamedTuple):
    """Scale and zero (N) of a group."""

    scale: Tensor
    zero: Tensor

    def units(self, weights: Tensor) -> Tensor:
        """Weights (N) in units of the scale from the zero; 0 where the scale is."""
        return (weights - self.zero) * torch.where(self.scale == 0, 0.0, 1 / self.scale)

    def values(self, levels: Tensor) -> Tensor:
        """What levels (N) stand for."""
        return torch.addcmul(self.zero, levels, self.scale)


class UniformLevels:
    """The levels of 4 or 2 bits: -8 … 7, -2 … 1."""

    zeros = searched = True

    def __init__(self, bits: int, group: int, dtype: torch.dtype) -> None:
        self.group, self.dtype = group, dtype
        self._middle = 1 << bits - 1

    def candidates(self, block: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        low, high = block.aminmax(dim=1)
        for first in SHRINKS:
            for last in SHRINKS:
                scale = (last * high - first * low) / (2 * self._middle - 1)
                yield scale, first * low + self._middle * scale

    def nearest(self, units: Tensor, scale: Tensor, before: Tensor | None = None) -> Tensor:
        return units.round().clamp_(-self._middle, self._middle - 1)


class NonUniformLevels:
    """The levels of `NonUniform`: a signed scale, no zero."""

    zeros = False
    searched = True

    def __init__(self, bits: int, group: int) -> None:
        self.group = group
        self.dtype = torch.bfloat16
        self._levels = torch.tensor(nonuniform.LEVELS[bits], dtype=torch.float32)
        self._between = (self._levels[1:] + self._levels[:-1]) / 2
        self._candidates = nonuniform.candidates(bits)

    def candidates(self, block: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        largest = block.abs().amax(1)
        for candidate in self._candidates:
            yield largest * candidate, torch.zeros_like(largest)

    def nearest(self, units: Tensor, scale: Tensor, before: Tensor | None = None) -> Tensor:
        return self._levels[torch.bucketize(units, self._between)]


class TrellisLevels:
    """The levels of `Trellis`: those of the rows of a block are chosen together, and errors count by the squares of
    the scales."""

    zeros = searched = False

    def __init__(self, group: int, dtype: torch.dtype) -> None:
        self.group, self.dtype = group, dtype

    def candidates(self, block: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        scale = trellis.usual_scale(block)
        yield scale, torch.zeros_like(scale)

    def nearest(self, units: Tensor, scale: Tensor, before: Tensor | None = None) -> Tensor:
        targets, weights = units.view(-1, BLOCK_ROWS), scale.square().view(-1, BLOCK_ROWS)
        _, levels = trellis.nearest(targets, weights)
        if before is not None:
            runs = before.view(-1, BLOCK_ROWS)
            old, new = ((each - targets).square_().mul_(weights).sum(1, keepdim=True) for each in (runs, levels))
            levels = torch.where(new < old, levels, runs)
        return levels.view(units.shape)


@torch.no_grad()
def solve(weight: Tensor, moments: Tensor, levels: Levels) -> Solution:
    """Levels, scales and zeros of a weight (N, K), any floating dtype, by the second moments (K, K) of its inputs,
    float32. PackError where either has infinite or undefined values."""
    if not (bool(torch.isfinite(weight).all()) and bool(torch.isfinite(moments).all())):
        raise PackError("a weight matrix, or what it gets as inputs, holds infinite or undefined values")
    order = _by_moment(levels.group, moments.diagonal())
    damped = moments[order][:, order]
    # so that the Cholesky factor exists; inputs that were always 0 count as if they were small
    damped.diagonal().add_(DAMPING * float(damped.diagonal().mean()) or 1.0)
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    rows, columns = weight.shape
    found = Solution(
        torch.empty(rows, columns),
        torch.empty(rows, columns // levels.group),
        torch.empty(rows, columns // levels.group),
    )
    groups = order[:: levels.group] // levels.group
    for first in range(0, rows, ROWS_TOGETHER):
        part = slice(first, first + ROWS_TOGETHER)
        wanted = weight[part].float()[:, order]
        codes = _first_codes(wanted, factor, levels)
        for _ in range(ROUNDS):
            codes.fit(damped, wanted)
            codes.choose_again(damped, wanted)
        found.values[part, order] = codes.values()
        found.scale[part, groups], found.zero[part, groups] = codes.scale, codes.zero
    return found


def solving_bytes(rows: int, columns: int) -> int:
    """Approximate largest memory of `solve`, in bytes, for a weight of so many rows and columns, beside the weight and
    the moments."""
    squares = columns * columns
    some = min(rows, ROWS_TOGETHER) * columns
    return 4 * (rows * columns + max(_SQUARES * squares, 2 * squares + _COPIES * some))


def change(weight: Tensor, values: Tensor, moments: Tensor) -> float:
    """tr(D H D'), D = values - weight, all float32: the change of the outputs on inputs of these second moments."""
    deviation = values - weight
    return float(((deviation @ moments) * deviation).sum(dtype=torch.float64))


def _by_moment(group: int, moments: Tensor) -> Tensor:
    """The columns in the order in which they are treated, given their second moments (K): groups by falling sum, the
    columns of a group by falling moment."""
    grouped = moments.view(-1, group)
    columns = grouped.argsort(dim=1, descending=True, stable=True)
    groups = grouped.gather(1, columns).sum(1).argsort(descending=True, stable=True)
    return (columns[groups] + groups[:, None] * group).flatten()


def _rounded(block: Tensor, place: Place, factor: Tensor, kind: Levels) -> tuple[Tensor, Tensor]:
    """Levels of the columns (N, group) of a group that are rounded one after the other, and the errors that they hand
    on, both (N, group); factor (group, group): the group's part of the Cholesky factor."""
    rest = block.t().contiguous()  # a column is then one run
    levels, errors = torch.empty_like(rest), torch.empty_like(rest)
    for column in range(len(rest)):
        levels[column] = kind.nearest(place.units(rest[column]), place.scale)
        torch.sub(rest[column], place.values(levels[column]), out=errors[column]).div_(factor[column, column])
        rest[column + 1 :].addr_(factor[column, column + 1 :], errors[column], alpha=-1)
    return levels.t(), errors.t()


class _Codes:
    """Levels (N, K) while they are solved for, in the order in which columns are treated; scale and zero (N, G)."""

    def __init__(self, shape: torch.Size, levels: Levels) -> None:
        rows, columns = shape
        self._kind = levels
        self.levels = torch.empty(rows, columns)
        self.scale, self.zero = torch.empty(2, rows, columns // levels.group)

    def place(self, group: int) -> Place:
        return Place(self.scale[:, group], self.zero[:, group])

    def values(self) -> Tensor:
        """What the levels stand for, (N, K)."""
        return torch.addcmul(self._spread(self.zero), self.levels, self._spread(self.scale))

    def fit(self, moments: Tensor, wanted: Tensor) -> None:
        """The scales and zeros of least change for these levels, a row's all together; as before where the dtype's
        rounding leaves no gain."""
        for first in range(0, len(wanted), _ROWS):
            part = slice(first, first + _ROWS)
            self._fit_rows(moments, wanted[part], part)

    def choose_again(self, moments: Tensor, wanted: Tensor) -> None:
        """Each column's levels of least change, one after the other, with all others as they are."""
        deviation = self.values().sub_(wanted)
        slope = deviation @ moments
        best = wanted + deviation
        kind = self._kind
        for group in range(self.scale.shape[1]):
            place = self.place(group)
            begin, end = group * kind.group, (group + 1) * kind.group
            # a column is then one run
            own, target, levels = (each[:, begin:end].t().contiguous() for each in (slope, best, self.levels))
            moved = torch.empty_like(own)
            for column in range(kind.group):
                at = begin + column
                target[column].sub_(own[column] / moments[at, at])
                level = kind.nearest(place.units(target[column]), place.scale, levels[column])
                moved[column] = (level - levels[column]) * place.scale
                levels[column] = level
                own[column + 1 :].addr_(moments[at, at + 1 : end], moved[column])
            self.levels[:, begin:end] = levels.t()
            slope[:, end:].addmm_(moved.t(), moments[begin:end, end:])

    def _spread(self, parameter: Tensor) -> Tensor:
        return parameter.repeat_interleave(self._kind.group, 1)

    def _fit_rows(self, moments: Tensor, wanted: Tensor, part: slice) -> None:
        square, linear = self._normal_equations(moments, wanted, self.levels[part])
        parameters = [self.scale[part], self.zero[part]] if self._kind.zeros else [self.scale[part]]
        old = torch.cat(parameters, 1).double()
        ridge = _RIDGE * square.diagonal(dim1=1, dim2=2).mean(1, keepdim=True).clamp_min(1e-30)
        free = torch.linalg.solve(square + torch.diag_embed(ridge.expand_as(old)), linear + ridge * old)
        new = free.to(self._kind.dtype).double()

        def value(parameters: Tensor) -> Tensor:
            return ((square @ parameters[..., None])[..., 0] - 2 * linear).mul_(parameters).sum(1)

        better = (value(new) < value(old)) & torch.isfinite(new).all(1)
        groups = self.scale.shape[1]
        if self._kind.zeros:
            better &= (new[:, :groups] > 0).all(1)
        kept = torch.where(better[:, None], new, old).float()
        self.scale[part] = kept[:, :groups]
        if self._kind.zeros:
            self.zero[part] = kept[:, groups:]

    def _normal_equations(self, moments: Tensor, wanted: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
        """A (n, P, P) and b (n, P), float64, of the scales, then the zeros: the change is p'Ap - 2 p'b and what they do
        not touch."""
        rows, groups, width = len(levels), self.scale.shape[1], self._kind.group
        count = groups * (1 + self._kind.zeros)
        square, linear = torch.empty(rows, count, count).double(), torch.empty(rows, count).double()

        def by_group(values: Tensor) -> Tensor:
            return values.view(rows, groups, width).sum(-1)

        for group in range(groups):
            columns = slice(group * width, (group + 1) * width)
            sides = [levels[:, columns] @ moments[columns]]
            if self._kind.zeros:
                sides.append(moments[columns].sum(0).expand(rows, -1).contiguous())
            for kind, side in enumerate(sides):
                at = kind * groups + group
                square[:, at, :groups] = by_group(side * levels).double()
                if self._kind.zeros:
                    square[:, at, groups:] = by_group(side).double()
                linear[:, at] = (side * wanted).sum(1).double()
        return square, linear


def _first_codes(wanted: Tensor, factor: Tensor, kind: Levels) -> _Codes:
    """The codes of GPTQ, before scales are solved for again."""
    codes, rest = _Codes(wanted.shape, kind), wanted.clone()
    weights = factor.diagonal().square().reciprocal()
    for group in range(codes.scale.shape[1]):
        begin, end = group * kind.group, (group + 1) * kind.group
        place = _searched(rest[:, begin:end], weights[begin:end], kind)
        codes.scale[:, group], codes.zero[:, group] = place
        own = factor[begin:end, begin:end]
        codes.levels[:, begin:end], errors = _rounded(rest[:, begin:end], place, own, kind)
        rest[:, end:].addmm_(errors, factor[begin:end, end:], alpha=-1)
    return codes


def _searched(block: Tensor, weights: Tensor, kind: Levels) -> Place:
    """Scale and zero of a group (N, group) with the least sum of squared errors, weighted (group), of nearest levels:
    of the candidates, then of what least squares for the levels make of the best; of equal ones the first."""
    if not kind.searched:
        return Place(*(each.to(kind.dtype).float() for each in next(kind.candidates(block))))
    columns, weights = block.t().contiguous(), weights[:, None]
    least = torch.full_like(columns[0], torch.inf)
    best = Place(torch.zeros_like(least), torch.zeros_like(least))

    def judge(scale: Tensor, zero: Tensor) -> None:
        nonlocal least, best
        place = Place(scale.to(kind.dtype).float(), zero.to(kind.dtype).float())
        deviation = place.values(kind.nearest(place.units(columns), place.scale)).sub_(columns)
        error = deviation.square_().mul_(weights).sum(0)
        better = error < least
        least = torch.where(better, error, least)
        best = Place(*(torch.where(better, new, old) for new, old in zip(place, best, strict=True)))

    for scale, zero in kind.candidates(block):
        judge(scale, zero)
    total = weights.sum()
    for _ in range(_FITS):
        levels = kind.nearest(best.units(columns), best.scale)
        middle, mean = torch.zeros_like(least), torch.zeros_like(least)
        if kind.zeros:
            middle, mean = (levels * weights).sum(0) / total, (columns * weights).sum(0) / total
        spread = levels - middle
        scale = (spread * weights * (columns - mean)).sum(0) / (spread.square() * weights).sum(0)
        judge(scale, mean - scale * middle)
    return best


def levels_of(encoding: Encoding | None, dtype: torch.dtype) -> Levels | None:
    """The levels of an encoding for kernels that compute in `dtype`; None where GPTQ does not solve for it."""
    match encoding:
        case Int4():
            return UniformLevels(encoding.bits, encoding.group, dtype)
        case NonUniform():
            return NonUniformLevels(encoding.bits, encoding.group)
        case Trellis():
            return TrellisLevels(encoding.group, dtype)
    return None


class Solved:
    """The `Quantizer` of a solution: it gives the solution's scales and zeros, under which the values are levels."""

    def __init__(self, solution: Solution) -> None:
        self._solution = solution
        self.scale = solution.scale

    def rows(self, first: int, last: int) -> tuple[Tensor, Solved]:
        """The values of the rows first..last - 1, float32, and their quantizer."""
        part = slice(first, last)
        values, scale, zero = self._solution
        return values[part], Solved(Solution(values[part], scale[part], zero[part]))

    def parameters(self, weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
        # float64: the encodings' sums give the zeros back as they were
        return self.scale, self._solution.zero.double() - (1 << bits - 1) * self.scale.double()

    def row_multiple(self, columns: int) -> int:
        return 1
