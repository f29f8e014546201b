"""A MoE block for a few tokens in one call: router, the chosen experts, their weighted sum, the residual."""

from __future__ import annotations

import torch
from torch import Tensor

from tiermoe.formats.scratch import scratch
from tiermoe.kernels.experts import GatedExperts
from tiermoe.kernels.router import Router, router_of
from tiermoe.native import _native


class MoeBlock:
    """A MoE block of `experts` experts, none resident at first. An expert is resident from `place` to `remove`.

    A call computes the whole block. `route` or `routed`, `compute` for experts as they arrive, and `total` compute it
    in parts. The blocks of a thread share a workspace: the parts of one end before those of another begin."""

    def __init__(self, kernel: GatedExperts, experts: int) -> None:
        self._absent = kernel.absent()
        self._each = len(self._absent)
        self._table = bytearray(self._absent * experts)
        self._experts, self._hidden = experts, kernel.hidden
        self._router: tuple[Router | int, bytes] | None = None  # or how many experts a token has
        self._call: bytes  # the kernel's arguments for the current tokens
        self._row = 0  # of the results: the next free one

    def place(self, expert: int, packed: bytes) -> None:
        """Makes an expert resident. packed: of `GatedExperts.pack`."""
        self._table[expert * self._each : (expert + 1) * self._each] = packed

    def remove(self, expert: int) -> None:
        """Makes an expert absent."""
        self._table[expert * self._each : (expert + 1) * self._each] = self._absent

    def __call__(self, router: Router, x: Tensor, residual: Tensor | None, out: Tensor) -> int:
        """Writes residual + the block of x to `out`, (T, H) each, in bfloat16 and contiguous, and returns the number of
        experts that computed; 0 where an expert that the router chooses is absent, and nothing is written. Without a
        residual, the block of x. The bits are those of the separate calls."""
        self._begin(router, x)
        computed: int = _native.block(self._call, 0 if residual is None else residual.data_ptr(), out.data_ptr())
        return computed

    def route(self, router: Router, x: Tensor) -> list[list[int]]:
        """Each token's experts, in ascending order. x: as in a call."""
        self._begin(router, x)
        return _native.block_route(self._call)

    def chosen(self) -> list[list[int]]:
        """Each token's experts, in ascending order, of the last call. A call that computed nothing goes on with
        `compute` and `total`."""
        return _native.block_chosen(self._call)

    def routed(self, x: Tensor, index: Tensor, weights: Tensor) -> None:
        """Tokens x (T, H), in bfloat16 and contiguous, with known choices: experts `index` (T, K) in any order, an
        index beyond the block's names none, with `weights` (T, K)."""
        index, weights = index.long().contiguous(), weights.float().contiguous()
        self._begin(index.shape[1], x)
        _native.block_routed(self._call, index.data_ptr(), weights.data_ptr())

    def compute(self, experts: list[int]) -> None:
        """Computes some of the chosen experts, which are resident, for the tokens that chose them."""
        self._row = _native.block_experts(self._call, experts, self._row)

    def total(self, residual: Tensor | None, out: Tensor) -> None:
        """Writes what a call writes, from the experts that have computed."""
        _native.block_sum(self._call, 0 if residual is None else residual.data_ptr(), out.data_ptr())

    def _begin(self, router: Router | int, x: Tensor) -> None:
        """Sets up the kernel for tokens x. router: or the number of experts a token, where choices are known."""
        if self._router is None or self._router[0] is not router:
            packed = router_of(self._experts, self._hidden, router) if isinstance(router, int) else router.pack()
            self._router = router, packed
        packed, threads, tokens = self._router[1], torch.get_num_threads(), x.shape[0]
        workspace = scratch.address("block", _native.block_workspace(packed, self._table, tokens, threads))
        self._call = _native.block_call(packed, self._table, x.data_ptr(), tokens, workspace, threads)
        self._row = 0
