"""One packed matrix times its tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tiermoe.kernels.native.matrix import MatrixForm
from tiermoe.native import _native
from tiermoe.quant.scratch import scratch
from tiermoe.types import FEW_TOKENS


def linear(x: Tensor, form: MatrixForm, fields: Mapping[str, Tensor]) -> Tensor:
    """x (M, in_) in bfloat16 → (M, out). A token's result does not depend on the other tokens. ValueError for another
    dtype or width."""
    if x.dtype != torch.bfloat16 or x.shape[1:] != (form.in_,):
        raise ValueError(
            f"the native product takes tokens (M, {form.in_}) in bfloat16, not {tuple(x.shape)} in {x.dtype}"
        )
    x = x.contiguous()
    tokens = x.shape[0]
    result = torch.empty((tokens, form.out), dtype=torch.bfloat16)
    packed, threads = form.pack(fields), torch.get_num_threads()
    room = scratch.address("prepared", _native.prepared(packed, tokens, tokens, threads))
    _native.product(packed, x.data_ptr(), tokens, room, result.data_ptr(), threads, tokens > FEW_TOKENS)
    return result
