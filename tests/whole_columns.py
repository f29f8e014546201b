"""What native products may differ by from those of the decoded weights, and what of it the integers of AVX2's kernels
change of a token's columns (native/isa/avx2/strip_tokens.h)."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from tiermoe import native

STRIP = 256  # columns that share a scale
ROUNDING = 2.0**-8  # the most that rounding to bfloat16 changes a value, relative
SUMMED = 2e-6  # of sums in float32


def allowed(x: torch.Tensor, weight: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """The most that each of x (tokens, columns) times weight (rows, columns) may differ from `want`, which is exact;
    float64. Codes are multiplied before zeros and minima are taken off: what is summed may be as large as for the
    largest weight of a row."""
    summed = (SUMMED * x.double().abs() + change(x)).sum(1, keepdim=True)
    return want.abs() * ROUNDING + summed * weight.abs().amax(1)


def change(x: torch.Tensor) -> torch.Tensor:
    """The most that each column of x (tokens, columns) may differ from what is computed with, float64: nothing but in
    AVX2, and there nothing where it is at least 1/128 of its strip's largest power of two."""
    if native.instruction_set() != "avx2":
        return torch.zeros_like(x, dtype=torch.float64)
    strips = pad(x.double().abs(), (0, -x.shape[1] % STRIP)).unflatten(1, (-1, STRIP))
    largest = 2.0 ** strips.amax(2, keepdim=True).log2().floor()
    return torch.where(strips < largest / 128, largest * 2.0**-15, 0.0).flatten(1)[:, : x.shape[1]]
