"""Sets of neurons between policies, which have ints, and kernels, which have tensors."""

from __future__ import annotations

import numpy as np
import torch


def to_bits(mask: torch.Tensor) -> int:
    """A mask, bool (I,), as an int whose bit j is mask[j]."""
    return int.from_bytes(np.packbits(mask.numpy(), bitorder="little").tobytes(), "little")


def to_indices(bits: int) -> torch.Tensor:
    """The set's neurons in ascending order, int64 (n,)."""
    packed = np.frombuffer(bits.to_bytes(-(-bits.bit_length() // 8), "little"), dtype=np.uint8)
    return torch.from_numpy(np.flatnonzero(np.unpackbits(packed, bitorder="little")))
