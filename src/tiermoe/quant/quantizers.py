"""The quantizers by name: uneven levels (`uneven`), channel-wise symmetric linear quantization, as EdgeMoE uses it
(section 3.2), and half-quadratic quantization.

Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023. The scale of a group
comes from its smallest and largest weight; its zero point is solved for by alternating between the error's
shrinkage (the proximal step of an l_p norm, p < 1, which leaves outliers alone) and the zero point's mean.
Constants as published: p = 0.7, beta = 10, growing by kappa = 1.01 a step, 20 steps at most.

Where the published code keeps the last zero point of the whole matrix, the best one of each group is kept
here, by its mean absolute error. The first candidate is plain rounding, so that no group is worse than that.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tiermoe import native
from tiermoe.quant.quantized import Grid, Ladder, Quantized, Quantizer, nearest_codes, require_finite

NORM = 0.7
BETA = 10.0
KAPPA = 1.01
STEPS = 20

NONLINEAR = "nonlinear"
GPTQ, GPTQ_NONLINEAR = "gptq", "gptq-nonlinear"
CALIBRATED = (GPTQ, GPTQ_NONLINEAR)
"""Those that need to know what the matrices get as inputs (`quant.gptq`)."""

__all__ = ["CALIBRATED", "GPTQ", "GPTQ_NONLINEAR", "NONLINEAR", "QUANTIZERS", "Quantized", "Quantizer"]


class LinearQuantizer:
    """Rounds to multiples of one scale per output channel: its largest magnitude / largest code (1, 7, 127).

    The scale is repeated over the groups. A code is the multiple plus 2**(bits - 1): code 0 is never used."""

    name = "linear"

    def __call__(self, weight: Tensor, bits: int, group: int) -> Quantized:
        scale, offset = self.parameters(weight, bits, group)
        codes = nearest_codes(weight, scale[:, :1], offset[:, :1], 0, (1 << bits) - 1, torch.uint8)
        return Quantized(codes, scale, offset)

    def parameters(self, weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
        rows, columns = weight.shape
        scale = self.row_scale(weight, bits)
        offset = -(1 << (bits - 1)) * scale
        shape = (rows, columns // group)
        return scale.expand(shape).contiguous(), offset.expand(shape).contiguous()

    def rows_apart(self, columns: int) -> int:
        return 1

    def grid(self, weight: Tensor, group: int) -> Grid:
        """One ladder everywhere, whose levels are -1, 0, 1 and 2 times the scale of 2 bits; the last is never the
        nearest one."""
        scale = (self.row_scale(weight, 2) / 2).expand(-1, weight.shape[1] // group).contiguous()
        return Grid(scale, torch.zeros_like(scale), (Ladder(step=2, place=2),))

    @staticmethod
    def row_scale(weight: Tensor, bits: int) -> Tensor:
        """One scale per row, float32 (N, 1)."""
        low, high = weight.aminmax(dim=1, keepdim=True)
        scale = torch.maximum(-low, high).float() / ((1 << (bits - 1)) - 1)
        require_finite(scale)
        return scale


# a step of 5 spans all levels: its places are one
LADDERS = (*(Ladder(step, place) for step in (2, 3, 4) for place in range(4)), Ladder(5, 0))
BLOCK_WEIGHTS = 1 << 17  # weights solved at a time: their float32 temporaries stay in the cache

CONVERTED_BLOCKS = 16  # blocks that are there in float32 at a time: 8 MiB of weights


class HqqQuantizer:
    """Half-quadratic quantization of each group of consecutive weights of a row."""

    name = "hqq"

    def __call__(self, weight: Tensor, bits: int, group: int) -> Quantized:
        codes = torch.empty(weight.shape, dtype=torch.uint8)
        return Quantized(codes, *self._solved(weight, bits, group, codes))

    def parameters(self, weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
        return self._solved(weight, bits, group, None)

    def rows_apart(self, columns: int) -> int:
        return _block_rows(columns)

    def grid(self, weight: Tensor, group: int) -> Grid:
        """The levels of 4 bits, and every ladder."""
        scale, offset = self.parameters(weight, 4, group)
        return Grid(scale, offset + 8 * scale, LADDERS)

    @torch.no_grad()
    def _solved(self, weight: Tensor, bits: int, group: int, codes: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scales and offsets; fills `codes`."""
        rows, columns = weight.shape
        scale = torch.empty(rows, columns // group)
        offset = torch.empty_like(scale)
        step = CONVERTED_BLOCKS * _block_rows(columns)
        for first in range(0, rows, step):
            part = slice(first, first + step)
            some = None if codes is None else codes[part]
            _solve_rows(weight[part], group, (1 << bits) - 1, (some, scale[part], offset[part]))
        require_finite(scale, offset)
        return scale, offset


def _block_rows(columns: int) -> int:
    """Rows that are solved together: they stop at the same step."""
    return max(1, BLOCK_WEIGHTS // columns)


Found = tuple[Tensor | None, Tensor, Tensor]
"""Codes uint8 (rows, columns) where they are asked for, scales and offsets float32 (rows, columns / group)."""


def _solve_rows(weight: Tensor, group: int, largest: int, found: Found) -> None:
    """Fills `found` for some rows, block by block; natively where no error is large enough to be shrunk."""
    rows, columns = weight.shape
    codes, scale, offset = found
    block = _block_rows(columns)
    blocks: Sequence[int] = range(-(-rows // block))
    if native.quantizes() and group % 16 == 0 and group <= native.MOST_GROUP:
        thresholds = [_threshold(BETA * KAPPA**step) for step in range(STEPS)]
        taken = weight if weight.dtype in native.WEIGHTS else weight.float()
        blocks = native.hqq(taken.contiguous(), group, block, largest, thresholds, found)
    for number in blocks:
        part = slice(number * block, (number + 1) * block)
        # groups stand in the columns: what is one number per group is then contiguous
        weights = weight[part].reshape(-1, group).t().float().contiguous()
        its, *parameters = _solve(weights, largest)
        if codes is not None:
            codes[part].view(-1, group).copy_(its.t())
        for target, value in zip((scale, offset), parameters, strict=True):
            target[part].view(-1).copy_(value)


def _threshold(beta: float) -> float:
    """Errors of up to this magnitude are shrunk to 0."""
    return float(beta ** (-1 / (2 - NORM)))


def _solve(weights: Tensor, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (group, n), scale (n) and offset (n) of `weights` (group, n)."""
    low, high = weights.aminmax(dim=0)
    scale = (high - low) / largest
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    scaled = weights / safe
    zero = _solve_zero(scaled, -low / safe, safe, largest)
    codes = scaled.add_(zero).round_().clamp_(0, largest)
    # in a group of equal weights every code is the same one: the offset takes its place
    offset = torch.where(scale == 0, low, -zero * scale)
    return codes.to(torch.uint8), scale, offset


def _solve_zero(scaled: Tensor, zero: Tensor, scale: Tensor, largest: int) -> Tensor:
    """The zero point (n) of each group; `scaled` (group, n) and `zero` are in units of `scale` (n)."""
    best, best_error = zero, torch.full_like(zero, torch.inf)
    beta = BETA
    error, codes = torch.empty_like(scaled), torch.empty_like(scaled)
    for _ in range(STEPS):
        torch.add(scaled, zero, out=error)
        torch.round(error, out=codes)
        error.sub_(codes.clamp_(0, largest))
        mean = error.mean(dim=0)
        size = torch.abs(error, out=codes).mean(dim=0)
        better = size < best_error
        if not bool(better.any()):
            break
        best, best_error = torch.where(better, zero, best), torch.where(better, size, best_error)
        zero = zero - mean + _shrunk_mean(error, scale, beta)
        beta *= KAPPA
    return best


def _shrunk_mean(error: Tensor, scale: Tensor, beta: float) -> Tensor | float:
    """The mean over each group of sign(e) * relu(|e| - |e|**(p - 1) / beta) in units of `scale`;
    e = error * scale."""
    if float((error.abs().amax(dim=0) * scale).max()) <= _threshold(beta):
        return 0.0
    weights_error = error * scale
    magnitude = weights_error.abs()
    shrunk = torch.relu(magnitude - magnitude.pow(NORM - 1) / beta)
    return (torch.sign(weights_error) * shrunk).mean(dim=0) / scale


class NonlinearQuantizer(HqqQuantizer):
    """Uneven levels (`quant.uneven`), whose encoding searches for its scales itself; HQQ for what has no such encoding:
    shapes and layouts that it does not take."""

    name = NONLINEAR


class GptqQuantizer(HqqQuantizer):
    """HQQ for what `quant.gptq` does not solve."""

    name = GPTQ


class GptqNonlinearQuantizer(HqqQuantizer):
    """Likewise."""

    name = GPTQ_NONLINEAR


QUANTIZERS: dict[str, Quantizer] = {
    each.name: each
    for each in (
        NonlinearQuantizer(), HqqQuantizer(), LinearQuantizer(), GptqQuantizer(), GptqNonlinearQuantizer()
    )
}  # fmt: skip
