"""What a second forward has in common with the others: its place, and what it must agree with."""

from __future__ import annotations

from typing import Any

import torch


class TakenOver:
    """Stands in the place of a module's forward, which is transformers' own, while it is attached."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._forward = module.forward

    def attach(self) -> None:
        self._module.forward = self

    def detach(self) -> None:
        """transformers' own forward, as before."""
        del self._module.forward


def alike(want: Any, got: torch.Tensor, most: float) -> bool:
    """Whether `want` is a tensor of `got`'s shape from which `got` differs by at most `most`, relative to its norm.
    bfloat16 rounds to 0.004."""
    if not isinstance(want, torch.Tensor) or want.shape != got.shape:
        return False
    return bool((want.float() - got.float()).norm() <= most * want.float().norm())
