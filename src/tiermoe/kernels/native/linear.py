"""One packed matrix times its tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tiermoe.native import _native
from tiermoe.quant.scratch import scratch


def matrix_of(slot: Mapping[str, Tensor], out: int, in_: int, group: int) -> bytes:
    """What the kernels are told of a matrix whose Int4 fields `slot` holds; valid as long as those tensors live."""
    return _native.matrix(slot["codes"].data_ptr(), slot["scales_and_zeros"].data_ptr(), out, in_, group)


def linear(x: Tensor, slot: Mapping[str, Tensor], out: int, in_: int, group: int) -> Tensor:
    """x (M, in_) in bfloat16 → (M, out). A token's result does not depend on the other tokens."""
    x = x.contiguous()
    tokens = x.shape[0]
    result = torch.empty((tokens, out), dtype=torch.bfloat16)
    packed, threads = matrix_of(slot, out, in_, group), torch.get_num_threads()
    sums = scratch.address("sums", _native.sums(packed, tokens, tokens, threads))
    _native.product(packed, x.data_ptr(), tokens, sums, result.data_ptr(), threads, tokens > 1)
    return result
