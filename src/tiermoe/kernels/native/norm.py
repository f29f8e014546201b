"""A root mean square norm."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tiermoe.kernels.native.attention import KINDS
from tiermoe.native import _native, available

COLUMNS = 16  # a width is a multiple of it
Kind = Literal["rms", "rms_at_once", "rms_centred"]


def takes(weight: Tensor) -> bool:
    """Whether the kernels take a norm's weight (H)."""
    plain = weight.dtype == torch.bfloat16 and weight.is_contiguous() and weight.device.type == "cpu"
    return plain and weight.ndim == 1 and weight.numel() % COLUMNS == 0 and available()


def norm(x: Tensor, weight: Tensor, epsilon: float, kind: Kind = "rms") -> Tensor:
    """weight * x / sqrt(mean(x^2) + epsilon), for contiguous x (..., H) in bfloat16; kind: of `attention.Norm`."""
    out = torch.empty_like(x)
    width = weight.numel()
    _native.norm(
        x.data_ptr(), weight.data_ptr(), epsilon, KINDS[kind], x.numel() // width, width, out.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return out
