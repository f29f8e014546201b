"""A MoE block for a few tokens in one call: router, the chosen experts, their weighted sum, the residual."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from tiermoe.kernels.native.experts import GatedExperts
from tiermoe.kernels.native.router import Router, router_of
from tiermoe.native import _native
from tiermoe.quant.scratch import scratch


class MoeBlock:
    """A block of `experts` experts, none of them here at first. One that was `place`d stays where it is while it
    computes.

    A call computes the whole block. `route` or `routed`, `compute` for experts as they come, and `total` compute it in
    parts. The blocks of a thread share a workspace: the parts of one end before those of another begin."""

    def __init__(self, kernel: GatedExperts, experts: int) -> None:
        absent = kernel.absent()
        self._each = len(absent)
        self._table = bytearray(absent * experts)
        self._experts, self._hidden = experts, kernel.hidden
        self._router: tuple[Router | int, bytes] | None = None  # or how many experts a token has
        self._chosen = array("q")
        self._call: bytes  # what the kernel is told of the tokens that compute
        self._row = 0  # of the results: the next free one

    def place(self, expert: int, packed: bytes) -> None:
        """The expert is here now, as `GatedExperts.pack` says."""
        self._table[expert * self._each : (expert + 1) * self._each] = packed

    def __call__(self, router: Router, x: Tensor, residual: Tensor | None) -> tuple[Tensor | None, int]:
        """x and residual (T, 1, H) in bfloat16 and contiguous → residual + the block of x, (T, 1, H), and the number of
        experts that computed; None and 0 where one that the router chooses is not here. Without a residual, the block
        of x. Gives what the separate calls give, bit for bit."""
        self._begin(router, x)
        out = torch.empty_like(x)
        computed = _native.block(self._call, 0 if residual is None else residual.data_ptr(), out.data_ptr())
        return (out if computed else None), computed

    def route(self, router: Router, x: Tensor) -> list[list[int]]:
        """Each token's experts, in ascending order. x: as in a call."""
        self._begin(router, x)
        k, chosen, choices = router.k, self._chosen, x.shape[0] * router.k
        if len(chosen) < choices:
            chosen.extend([0] * (choices - len(chosen)))
        _native.block_route(self._call, chosen.buffer_info()[0])
        return [chosen[first : first + k].tolist() for first in range(0, choices, k)]

    def routed(self, x: Tensor, index: Tensor, weights: Tensor) -> None:
        """x (T, H) in bfloat16 and contiguous has chosen already: experts `index` (T, K) in any order, an index beyond
        the block's names none, with `weights` (T, K)."""
        index, weights = index.long().contiguous(), weights.float().contiguous()
        self._begin(index.shape[1], x)
        _native.block_routed(self._call, index.data_ptr(), weights.data_ptr())

    def compute(self, experts: list[int]) -> None:
        """Those of the chosen experts, which are here now, compute for the tokens that chose them."""
        self._row = _native.block_experts(self._call, experts, self._row)

    def total(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """What a call gives, of the experts that have computed."""
        out = torch.empty_like(x)
        _native.block_sum(self._call, 0 if residual is None else residual.data_ptr(), out.data_ptr())
        return out

    def _begin(self, router: Router | int, x: Tensor) -> None:
        """Tokens x compute next. router: or how many experts a token has, whose choice is known."""
        if self._router is None or self._router[0] is not router:
            packed = router_of(self._experts, self._hidden, router) if isinstance(router, int) else router.pack()
            self._router = router, packed
        packed, threads, tokens = self._router[1], torch.get_num_threads(), x.shape[0]
        workspace = scratch.address("block", _native.block_workspace(packed, self._table, tokens, threads))
        self._call = _native.block_call(packed, self._table, x.data_ptr(), tokens, workspace, threads)
        self._row = 0
