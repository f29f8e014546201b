"""Decoding a token of each sequence: a router in two native calls instead of seven of torch's, which cost
more than the arithmetic."""

from __future__ import annotations

from typing import Any

import torch

from tiermoe.kernels.native.router import Router, choose, logits_of, takes
from tiermoe.runtime.one_token.taken_over import TakenOver
from tiermoe.types import FEW_TOKENS

_TOKENS = 64  # random ones on which both forwards are compared
_SAME = 0.8  # least share of them with the same experts in order: logits in bfloat16 are often all but equal
_CLOSE = 0.02  # relative difference of their weights


class OneTokenRouter(TakenOver):
    """A router's forward: softmax of a matrix product and the K largest for a few tokens, transformers'
    own for more.

    normalise: weights sum to 1. dtype: of the weights."""

    def __init__(self, router: Any, normalise: bool, dtype: torch.dtype) -> None:
        super().__init__(router)
        self.normalise = normalise
        self.dtype = dtype
        self.top_k = int(router.top_k)
        self.columns = int(router.weight.shape[1])

    @property
    def weight(self) -> torch.Tensor:
        """The matrix (E, H)."""
        weight: torch.Tensor = self._module.weight
        return weight

    @property
    def description(self) -> Router:
        """What the kernel of a whole block is told of it."""
        return Router(self.weight, self.top_k, normalise=self.normalise, dtype=self.dtype)

    def __call__(self, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        weight = self.weight
        few = hidden_states.shape[-1] == weight.shape[1] and hidden_states.numel() <= FEW_TOKENS * weight.shape[1]
        plain = few and hidden_states.dtype == weight.dtype == torch.bfloat16
        if arguments or named or not plain or torch.is_grad_enabled():
            return self._forward(hidden_states, *arguments, **named)
        return self.route(hidden_states)

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden (..., H), T tokens → logits (T, E), weights (T, K) and experts (T, K)."""
        logits = logits_of(self.weight, hidden.contiguous())
        weights, experts = choose(logits, self.top_k, self.normalise)
        return logits, weights if self.dtype == torch.float32 else weights.to(self.dtype), experts

    def agrees(self, hidden: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> bool:
        """Whether it chooses what transformers chose for tokens (T, H), but for what rounding decides."""
        _, mine, chosen = self.route(hidden)
        if chosen.shape != experts.shape:
            return False
        same = (chosen == experts).all(1)
        close = torch.allclose(mine[same].float(), weights[same].float(), rtol=_CLOSE)
        return int(same.sum()) >= _SAME * len(hidden) and close


def one_token_router(router: Any) -> OneTokenRouter | None:
    """A router's fast forward; None where it chooses in another way."""
    weight = getattr(router, "weight", None)
    if not isinstance(weight, torch.Tensor) or not isinstance(getattr(router, "top_k", None), int) or not takes(weight):
        return None
    hidden = torch.randn(_TOKENS, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    try:
        with torch.no_grad():
            _, weights, experts = router.forward(hidden)
    except (TypeError, ValueError):  # it takes or gives something else
        return None
    for normalise in (False, True):
        fast = OneTokenRouter(router, normalise, weights.dtype)
        if fast.agrees(hidden, weights, experts):
            return fast
    return None
