"""Reading ahead: the next layer's router on this layer's input says which experts will likely be asked for.

Only the time of arrival changes, never a result. HOBBIT (section 4) and Fate (section 3) report that the inputs of
neighbouring layers' routers are alike; the router itself is called, so that it is its selection that is predicted
(biases and groups included).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tiermoe.controller import Controller
from tiermoe.types import ExpertKey


class NextGate:
    """Prefetches layer l+1's likely experts when layer l has run for a single token."""

    def __init__(self, shells: list[Any], model: Any, controller: Controller, bits: int) -> None:
        self._controller = controller
        self._bits = bits
        self._routers = [_router_beside(shell, model) for shell in shells]

    def after(self, layer: int) -> Callable[[torch.Tensor], None] | None:
        """What to call with layer `layer`'s input (1, hidden); None for the last layer."""
        if layer + 1 == len(self._routers):
            return None
        router = self._routers[layer + 1]

        def prefetch(hidden: torch.Tensor) -> None:
            _, _, index = router(hidden)
            self._controller.prefetch(ExpertKey(layer + 1, expert, self._bits) for expert in index[0].tolist())

        return prefetch


def _router_beside(shell: Any, model: Any) -> Any:
    for module in model.modules():
        if getattr(module, "experts", None) is shell:
            return getattr(module, "gate", None) or module.router
    raise LookupError("the experts module has no router beside it")
