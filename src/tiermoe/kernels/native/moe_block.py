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
        self._call: tuple[bytes, bytearray, int, int, int, int]  # arguments that the parts share
        self._row = 0  # of the results: the next free one

    def place(self, expert: int, packed: bytes) -> None:
        """The expert is here now, as `GatedExperts.pack` says."""
        self._table[expert * self._each : (expert + 1) * self._each] = packed

    def __call__(self, router: Router, x: Tensor, residual: Tensor | None) -> tuple[Tensor | None, int]:
        """x and residual (T, 1, H) in bfloat16 and contiguous → residual + the block of x, (T, 1, H), and the number of
        experts that computed; None and 0 where one that the router chooses is not here. Without a residual, the block
        of x. Gives what the separate calls give, bit for bit."""
        self._begin(self._packed(router), x)
        packed, table, address, tokens, workspace, threads = self._call
        out = torch.empty_like(x)
        computed = _native.block(
            packed, table, address, 0 if residual is None else residual.data_ptr(), tokens, workspace, out.data_ptr(),
            threads,
        )  # fmt: skip
        return (out if computed else None), computed

    def route(self, router: Router, x: Tensor) -> list[list[int]]:
        """Each token's experts, in ascending order. x: as in a call."""
        k, chosen, tokens = router.k, self._chosen, x.shape[0]
        self._begin(self._packed(router), x)
        if len(chosen) < tokens * k:
            chosen.extend([0] * (tokens * k - len(chosen)))
        _native.block_route(*self._call, chosen.buffer_info()[0])
        listed = chosen.tolist()
        return [listed[first : first + k] for first in range(0, tokens * k, k)]

    def routed(self, x: Tensor, index: Tensor, weights: Tensor) -> None:
        """x (T, H) in bfloat16 and contiguous has chosen already: experts `index` (T, K) in any order, an index beyond
        the block's names none, with `weights` (T, K)."""
        index, weights = index.long().contiguous(), weights.float().contiguous()
        self._begin(self._packed(index.shape[1]), x)
        packed, table, _, tokens, workspace, threads = self._call
        _native.block_routed(packed, table, index.data_ptr(), weights.data_ptr(), tokens, workspace, threads)

    def compute(self, experts: list[int]) -> None:
        """Those of the chosen experts, which are here now, compute for the tokens that chose them."""
        self._row = _native.block_experts(*self._call, experts, self._row)

    def total(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """What a call gives, of the experts that have computed."""
        packed, table, _, tokens, workspace, threads = self._call
        out = torch.empty_like(x)
        _native.block_sum(
            packed, table, 0 if residual is None else residual.data_ptr(), tokens, workspace, threads, out.data_ptr()
        )
        return out

    def _begin(self, packed: bytes, x: Tensor) -> None:
        threads, tokens = torch.get_num_threads(), x.shape[0]
        workspace = scratch.address("block", _native.block_workspace(packed, self._table, tokens, threads))
        self._call = packed, self._table, x.data_ptr(), tokens, workspace, threads
        self._row = 0

    def _packed(self, router: Router | int) -> bytes:
        """router: or how many experts a token has, whose choice is known."""
        if self._router is None or self._router[0] is not router:
            packed = router_of(self._experts, self._hidden, router) if isinstance(router, int) else router.pack()
            self._router = router, packed
        return self._router[1]
