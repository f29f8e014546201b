"""A root mean square norm in one native call instead of eight of torch's."""

from __future__ import annotations

from typing import Any

import torch

from tiermoe.kernels.native.norm import norm, takes
from tiermoe.runtime.one_token.taken_over import TakenOver, alike

_AGREE = 0.01  # relative error of both forwards


class NativeNorm(TakenOver):
    """A norm's forward: the kernel, for whatever number of tokens; transformers' own for another dtype."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._epsilon = float(module.variance_epsilon)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self._module.weight
        plain = hidden_states.shape[-1] == weight.numel() and hidden_states.dtype == torch.bfloat16
        if not plain or not hidden_states.is_contiguous() or torch.is_grad_enabled():
            result: torch.Tensor = self._forward(hidden_states)
            return result
        return norm(hidden_states, weight, self._epsilon)

    def agrees(self) -> bool:
        """Whether both forwards give the same for a random token, up to rounding."""
        width = self._module.weight.numel()
        token = torch.randn(1, 1, width, generator=torch.Generator().manual_seed(0)).bfloat16() * 3
        with torch.no_grad():
            want, got = self._forward(token), norm(token, self._module.weight, self._epsilon)
        return alike(want, got, _AGREE)


def native_norm(module: Any) -> NativeNorm | None:
    """A norm's fast forward; None for what is no such norm."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or not hasattr(module, "variance_epsilon") or not takes(weight):
        return None
    fast = NativeNorm(module)
    return fast if fast.agrees() else None
