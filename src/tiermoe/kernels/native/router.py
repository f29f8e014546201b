"""A router that is a matrix: softmax over all experts, the K largest, for a few tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from tiermoe.native import _native, available

COLUMNS = 32  # a hidden size is a multiple of it


def takes(weight: Tensor) -> bool:
    """Whether the kernels take a router's matrix (E, H)."""
    plain = weight.dtype == torch.bfloat16 and weight.is_contiguous() and weight.device.type == "cpu"
    return plain and weight.ndim == 2 and weight.shape[1] % COLUMNS == 0 and available()


def logits_of(weight: Tensor, x: Tensor) -> Tensor:
    """weight (E, H) and tokens x (..., H) in bfloat16, both contiguous → (T, E)."""
    experts, columns = weight.shape
    tokens = x.numel() // columns
    logits = torch.empty((tokens, experts), dtype=torch.bfloat16)
    _native.logits(weight.data_ptr(), x.data_ptr(), tokens, experts, columns, logits.data_ptr())
    return logits


def choose(logits: Tensor, k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Of logits (T, E) in bfloat16: weights float32 (T, k) and experts int64 (T, k), of each token the largest first,
    of equal ones the first first. normalise: a token's weights sum to 1."""
    tokens = logits.shape[0]
    weights = torch.empty((tokens, k), dtype=torch.float32)
    experts = torch.empty((tokens, k), dtype=torch.int64)
    _native.choose(logits.data_ptr(), tokens, logits.shape[1], k, normalise, experts.data_ptr(), weights.data_ptr())
    return weights, experts
