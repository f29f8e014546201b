"""Quantizers: how the scales and zero points of 4 and 2 bits are found.

`LinearQuantizer`: channel-wise symmetric linear quantization, as EdgeMoE uses it (section 3.2).

`HqqQuantizer`: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023. The scale of a
group comes from its smallest and largest weight. Its zero point is solved for by alternating between the error's
shrinkage (the proximal step of an l_p norm, p < 1, which leaves outliers alone) and the zero point's mean. Constants as
published: p = 0.7, beta = 10, growing by kappa = 1.01 a step, 20 steps at most. The published code keeps the last zero
point of the whole matrix; this one keeps each group's zero point of smallest mean absolute error. The first candidate
is plain rounding, so that no group is worse than that.

Non-uniform levels search for their own scales (`formats.nonuniform`), GPTQ solves for codes (`formats.gptq`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tiermoe import native
from tiermoe.errors import PackError

NORM = 0.7
BETA = 10.0
KAPPA = 1.01
STEPS = 20

NONLINEAR = "nonlinear"
HQQ_DOUBLE = "hqq-double"
"""HQQ whose scales and zeros are quantised again, in the neuron unit (`formats.neurons`)."""
GPTQ, GPTQ_NONLINEAR = "gptq", "gptq-nonlinear"
UNCALIBRATED = {GPTQ: "hqq", GPTQ_NONLINEAR: NONLINEAR}
"""Calibrated quantizer → one that finds such codes from the weights alone."""

BLOCK_WEIGHTS = 1 << 17  # weights that HQQ solves at a time: their float32 temporaries stay in the cache
CONVERTED_BLOCKS = 16  # such blocks that are in float32 at a time: 8 MiB of weights
_ROUNDED_WEIGHTS = 1 << 18  # weights rounded at a time: bounds the float32 temporaries


class Quantizer(Protocol):
    """Finds scales and offsets for a weight (N, K) of any float dtype; K is a multiple of `group`."""

    def parameters(self, weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
        """Scales and offsets, float32 (N, K / group): weight ~ code * scale + offset, code 0 .. 2**bits - 1. A scale is
        never negative; it is 0 in a group of equal weights."""
        ...

    def row_multiple(self, columns: int) -> int:
        """A part of a matrix that begins at a multiple of this number of rows, and ends at one or with the matrix, gets
        the codes that it has in the matrix."""
        ...


class LinearQuantizer:
    """Multiples of one scale for each output channel: its largest magnitude / largest code (1, 7, 127).

    The scale is repeated over the groups. A code is the multiple plus 2**(bits - 1): code 0 is never used."""

    def parameters(self, weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
        shape = (weight.shape[0], weight.shape[1] // group)
        scale = self.row_scale(weight, bits)
        offset = -(1 << (bits - 1)) * scale
        return scale.expand(shape).contiguous(), offset.expand(shape).contiguous()

    def row_multiple(self, columns: int) -> int:
        return 1

    @staticmethod
    def row_scale(weight: Tensor, bits: int) -> Tensor:
        """One scale per row, float32 (N, 1)."""
        low, high = weight.aminmax(dim=1, keepdim=True)
        scale = torch.maximum(-low, high).float() / ((1 << (bits - 1)) - 1)
        require_finite(scale)
        return scale


class HqqQuantizer:
    """Half-quadratic quantization of each group of consecutive weights of a row."""

    @torch.no_grad()
    def parameters(self, weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
        rows, columns = weight.shape
        scale, offset = torch.empty(2, rows, columns // group)
        step = CONVERTED_BLOCKS * self.row_multiple(columns)
        for first in range(0, rows, step):
            part = slice(first, first + step)
            self._solve_rows(weight[part], group, (1 << bits) - 1, scale[part], offset[part])
        require_finite(scale, offset)
        return scale, offset

    def row_multiple(self, columns: int) -> int:
        """Rows that are solved at a time: they stop at the same step."""
        return max(1, BLOCK_WEIGHTS // columns)

    def _solve_rows(self, weight: Tensor, group: int, largest: int, scale: Tensor, offset: Tensor) -> None:
        """Fills scales and offsets (n, G) of some rows, block by block; natively where no error is large enough to be
        shrunk."""
        rows, columns = weight.shape
        block = self.row_multiple(columns)
        blocks: Sequence[int] = range(-(-rows // block))
        if native.quantizes() and group % 16 == 0 and group <= native.MOST_GROUP:
            thresholds = [_threshold(BETA * KAPPA**step) for step in range(STEPS)]
            taken = weight if weight.dtype in native.WEIGHTS else weight.float()
            blocks = native.hqq(taken.contiguous(), group, block, largest, thresholds, (None, scale, offset))
        for number in blocks:
            part = slice(number * block, (number + 1) * block)
            # groups are columns here, so that what is one number per group is contiguous
            groups = weight[part].reshape(-1, group).t().float().contiguous()
            for target, value in zip((scale, offset), _solve(groups, largest), strict=True):
                target[part].view(-1).copy_(value)


_HQQ = HqqQuantizer()

QUANTIZERS: dict[str, Quantizer] = {
    # HQQ stands in for shapes and layouts that non-uniform levels, or GPTQ, do not take
    NONLINEAR: _HQQ,
    "hqq": _HQQ,
    HQQ_DOUBLE: _HQQ,
    "linear": LinearQuantizer(),
    GPTQ: _HQQ,
    GPTQ_NONLINEAR: _HQQ,
}


def _threshold(beta: float) -> float:
    """Errors of up to this magnitude are shrunk to 0."""
    return float(beta ** (-1 / (2 - NORM)))


def _solve(weights: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Scale (n) and offset (n) of `weights` (group, n)."""
    low, high = weights.aminmax(dim=0)
    scale = (high - low) / largest
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = _solve_zero(weights / safe, -low / safe, safe, largest)
    # in a group of equal weights every code is the same one: the offset takes its place
    return scale, torch.where(scale == 0, low, -zero * scale)


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


def uniform_parameters(
    weight: Tensor, quantizer: Quantizer, bits: int, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scale and zero (N, K / group) of 4 or 2 bits as they are stored, in `dtype`: weight ~ (code - middle) * scale +
    zero, middle 2**(bits - 1)."""
    scale, offset = quantizer.parameters(weight, bits, group)
    return scale.to(dtype), (offset + (1 << bits - 1) * scale).to(dtype)


def uniform_codes(weight: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """The codes, uint8 (N, K), that are nearest under scales and zeros as they are stored: then their rounding costs
    next to nothing."""
    middle = 1 << bits - 1
    return nearest_codes(weight, scale, zero, -middle, middle - 1, torch.int8).add_(middle).view(torch.uint8)


def nearest(weight: Tensor, scale: Tensor, offset: Tensor, low: int, high: int) -> Tensor:
    """The integers in low..high for which ``integer * scale + offset`` is nearest to `weight`, as floats.

    A scale of 0 (a group of equal weights, or one too small for its dtype) gives the integer nearest to 0."""
    codes = torch.sub(weight, offset)
    codes.div_(torch.where(scale == 0, torch.inf, scale))
    return codes.round_().clamp_(low, high)


def nearest_codes(weight: Tensor, scale: Tensor, offset: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """`nearest` for a matrix (N, K) with `scale` and `offset` (N, G), all of any float dtype: (N, K) in `dtype`.

    Works on blocks of rows, so that no float32 copy of the matrix is made."""
    rows, columns = weight.shape
    groups = scale.shape[1]
    scale, offset = scale.float()[..., None], offset.float()[..., None]
    codes = torch.empty(rows, columns, dtype=dtype)
    block = max(1, _ROUNDED_WEIGHTS // columns)
    for first in range(0, rows, block):
        part = slice(first, first + block)
        grouped = weight[part].float().reshape(-1, groups, columns // groups)
        codes[part] = nearest(grouped, scale[part], offset[part], low, high).flatten(1)
    return codes


def require_finite(*parameters: Tensor) -> None:
    """Raises PackError where the weights had an infinity or NaN, which reaches every minimum and maximum."""
    if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
        raise PackError("a weight matrix holds infinite or undefined values and cannot be quantized")
