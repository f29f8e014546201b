"""Keys and values as codes of 8 bits: what a cache holds where that is asked for.

A head's key of a position, and its value, have a scale of their own, which maps the largest of its numbers to 127. The
native kernels make the same codes (native/kv_codes.c)."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 2
_LARGEST = 127


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows (..., columns) → codes int8 (..., columns) and scales bfloat16 (..., 1)."""
    wide = rows.float()
    scales = (wide.abs().amax(-1, keepdim=True) / _LARGEST).bfloat16()
    codes = torch.where(scales > 0, wide / scales.float(), 0).round_().clamp_(-_LARGEST, _LARGEST)
    return codes.to(torch.int8), scales


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What the codes stand for."""
    return (codes.float() * scales.float()).to(dtype)
