"""What stands in place of a model's experts: routing in, sum of the chosen experts out.

The sum runs in ascending expert index and in the hidden states' dtype, as transformers' eager experts do, whatever the
order in which the experts became available.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tiermoe.controller import Controller
from tiermoe.kernels.expert import ExpertKernel, Views
from tiermoe.runtime.shells import IMPLEMENTATION
from tiermoe.types import Demand

AfterLayer = Callable[[torch.Tensor], None]


class LayerExperts:
    """The experts of MoE layer `index`: called in place of the experts module.

    views_of: (layer, slot) → typed views of what the slot holds. after: called with the layer's input when a single
    token has passed (where a prefetch can begin).
    """

    def __init__(
        self,
        index: int,
        experts: int,
        bits: int,
        kernel: ExpertKernel,
        controller: Controller,
        views_of: Callable[[int, int], Views],
        after: AfterLayer | None = None,
    ) -> None:
        self._index = index
        self._experts = experts
        self._bits = bits
        self._kernel = kernel
        self._controller = controller
        self._views_of = views_of
        self._after = after

    @torch.no_grad()
    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden (T, H), index (T, K) of the chosen experts (a value of `experts` or more: none), weights (T, K)
        → (T, H)."""
        if hidden.shape[0] == 1:
            return self._one_token(hidden, index, weights)
        return self._many_tokens(hidden, index, weights)

    def _one_token(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        position = {expert: k for k, expert in enumerate(index[0].tolist()) if expert < self._experts}
        demands = [Demand(expert, 1, self._bits) for expert in position]
        outputs: dict[int, torch.Tensor] = {}
        for expert, slot in self._controller.run_layer(self._index, demands):
            k = position[expert]
            # a slice, not a scalar: a scalar tensor would not promote the product to float32 where weights are
            weighted = self._kernel(hidden, self._views_of(self._index, slot)) * weights[0, k : k + 1]
            outputs[expert] = weighted.to(hidden.dtype)
        if self._after is not None:
            self._after(hidden)
        if not outputs:
            return torch.zeros_like(hidden)
        first, *rest = (outputs[expert] for expert in sorted(outputs))
        for output in rest:
            first = first + output
        return first

    def _many_tokens(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, k = index.shape
        # positions in (k, token) order, as transformers' eager experts gather their rows
        by_expert = index.t().reshape(-1).argsort(stable=True)
        counts = torch.bincount(index.reshape(-1), minlength=self._experts).tolist()[: self._experts]
        ends: list[int] = []
        for count in counts:
            ends.append((ends[-1] if ends else 0) + count)
        # the place of each choice among its token's experts in ascending order: where its output is kept for the sum
        place = index.argsort(dim=1).argsort(dim=1).t().reshape(-1)
        flat_weights = weights.t().reshape(-1)
        complete = ends[-1] == tokens * k
        kept = (torch.empty if complete else torch.zeros)(
            (k, tokens, hidden.shape[1]), dtype=hidden.dtype, device=hidden.device
        )
        demands = [Demand(expert, count, self._bits) for expert, count in enumerate(counts) if count]
        for expert, slot in self._controller.run_layer(self._index, demands):
            rows = by_expert[ends[expert] - counts[expert] : ends[expert]]
            token = rows % tokens
            output = self._kernel(hidden[token], self._views_of(self._index, slot))
            kept[place[rows], token] = (output * flat_weights[rows, None]).to(hidden.dtype)
        total = kept[0]
        for output in kept[1:]:
            total += output
        return total


def register() -> None:
    """Makes transformers' experts modules call `run_experts`, an attribute that the engine sets on each shell."""

    def forward(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = module.run_experts(hidden, index, weights)
        return result

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, forward)
