"""Decoding a token of each sequence: a MoE block that is a router and experts, without the calls around them."""

from __future__ import annotations

from typing import Any

import torch

from tiermoe.runtime.one_token.asked import collected, hooked
from tiermoe.runtime.one_token.router import OneTokenRouter
from tiermoe.runtime.one_token.settled import SettledExperts
from tiermoe.runtime.one_token.taken_over import alike
from tiermoe.runtime.shells import is_shell

_AGREE = 0.02  # relative error of both ways through the block


class OneTokenBlock:
    """residual + experts(hidden, router(hidden)), for a block whose router has a fast forward."""

    def __init__(self, block: Any, gate: Any, router: OneTokenRouter) -> None:
        self._block = block
        self._experts = block.experts
        self._router = router
        self._watched = (block, gate, block.experts)

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """hidden and residual (B, 1, H) → (B, 1, H)."""
        run_experts = self._experts.run_experts
        settled: SettledExperts | None = getattr(run_experts, "settled", None)
        result = settled(self._router, hidden, residual) if settled is not None else None
        if result is not None:
            return result
        _, weights, chosen = self._router.route(hidden)
        added: torch.Tensor = residual + run_experts(hidden[:, 0], chosen, weights)[:, None]
        return added

    def is_plain(self) -> bool:
        """Whether nobody watches the block or its parts."""
        return not collected("router_logits") and not any(hooked(module) for module in self._watched)

    def agrees(self) -> bool:
        """Whether the block's own forward gives the same for a random token. In place of the experts stands a function
        of what they are given."""
        generator = torch.Generator().manual_seed(0)
        token = torch.randn(1, 1, self._router.columns, generator=generator).bfloat16()
        self._experts.run_experts = _stand_in
        try:
            with torch.no_grad():
                want, got = self._block.forward(token), self(token, torch.zeros_like(token))
        except (TypeError, RuntimeError):  # a forward of another shape
            return False
        finally:
            del self._experts.run_experts
        return alike(want, got, _AGREE)


def one_token_block(block: Any, gate: Any, router: OneTokenRouter) -> OneTokenBlock | None:
    """A block's fast way; None where it does more than to route."""
    parts = set(block._modules.values())
    if parts != {gate, block.experts} or block._parameters or not is_shell(block.experts):
        return None
    fast = OneTokenBlock(block, gate, router)
    return fast if fast.agrees() else None


def _stand_in(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    factor = (weights.float() * (1 + chosen)).sum(-1, keepdim=True)
    return (hidden * factor).to(hidden.dtype)
