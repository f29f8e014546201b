"""A MoE block for a few tokens in one call: router, the chosen experts, their weighted sum, the residual."""

from __future__ import annotations

import torch
from torch import Tensor

from tiermoe.kernels.native.experts import GatedExperts
from tiermoe.kernels.native.router import Router
from tiermoe.native import _native
from tiermoe.quant.scratch import scratch


class MoeBlock:
    """A block of `experts` experts, none of them here at first. Experts that are `place`d must stay where they are."""

    def __init__(self, kernel: GatedExperts, experts: int) -> None:
        absent = kernel.absent()
        self._each = len(absent)
        self._table = bytearray(absent * experts)

    def place(self, expert: int, packed: bytes) -> None:
        """The expert is here now, as `GatedExperts.pack` says."""
        self._table[expert * self._each : (expert + 1) * self._each] = packed

    def __call__(self, router: Router, x: Tensor, residual: Tensor | None) -> tuple[Tensor | None, int]:
        """x and residual (T, 1, H) in bfloat16 and contiguous → residual + the block of x, (T, 1, H), and the number of
        experts that computed; None and 0 where one that the router chooses is not here. Without a residual, the block
        of x. Gives what the separate calls give, bit for bit."""
        threads, tokens, packed = torch.get_num_threads(), x.shape[0], router.pack()
        out = torch.empty_like(x)
        workspace = scratch.address("block", _native.block_workspace(packed, self._table, tokens, threads))
        computed = _native.block(
            packed, self._table, x.data_ptr(), 0 if residual is None else residual.data_ptr(), tokens, workspace,
            out.data_ptr(), threads,
        )  # fmt: skip
        return (out if computed else None), computed
