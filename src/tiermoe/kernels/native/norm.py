"""A root mean square norm."""

from __future__ import annotations

import torch
from torch import Tensor

from tiermoe.kernels.native.attention import KINDS
from tiermoe.native import _native, available

COLUMNS = 16  # a width is a multiple of it


def takes(weight: Tensor) -> bool:
    """Whether the kernels take a norm's weight (H)."""
    plain = weight.dtype == torch.bfloat16 and weight.is_contiguous() and weight.device.type == "cpu"
    return plain and weight.ndim == 1 and weight.numel() % COLUMNS == 0 and available()


def norm(x: Tensor, weight: Tensor, epsilon: float, centred: bool = False) -> Tensor:
    """weight * x / sqrt(mean(x^2) + epsilon), for contiguous x (..., H) in bfloat16, rounded before the product with
    the weight. centred: the weight is 1 + `weight`, and only the product is rounded."""
    out = torch.empty_like(x)
    width, kind = weight.numel(), KINDS["rms_centred" if centred else "rms"]
    _native.norm(
        x.data_ptr(), weight.data_ptr(), epsilon, kind, x.numel() // width, width, out.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return out
