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
    """Prefetches layer l+1's likely experts when layer l has run for a single token.

    A router is called with what its block gives it beside the input (MiniMax-M2's correction bias), as seen in the
    model's own last call; before the first one nothing is predicted.
    """

    def __init__(self, shells: list[Any], model: Any, controller: Controller, bits: int) -> None:
        self._controller = controller
        self._bits = bits
        self._routers = [_router_beside(shell, model) for shell in shells]
        self._beside_input: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._hooks = [
            router.register_forward_pre_hook(self._remember(layer), with_kwargs=True)
            for layer, router in enumerate(self._routers)
        ]

    def after(self, layer: int) -> Callable[[torch.Tensor], None] | None:
        """What to call with layer `layer`'s input (1, hidden); None for the last layer."""
        following = layer + 1
        if following == len(self._routers):
            return None
        router = self._routers[following]

        def prefetch(hidden: torch.Tensor) -> None:
            if following in self._beside_input:
                arguments, named = self._beside_input[following]
                _, _, index = router(hidden, *arguments, **named)
                self._controller.prefetch(ExpertKey(following, expert, self._bits) for expert in index[0].tolist())

        return prefetch

    def close(self) -> None:
        """Takes its hooks off the model's routers."""
        for hook in self._hooks:
            hook.remove()

    def _remember(self, layer: int) -> Callable[..., None]:
        def remember(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._beside_input[layer] = (arguments[1:], named)

        return remember


def _router_beside(shell: Any, model: Any) -> Any:
    for module in model.modules():
        if getattr(module, "experts", None) is shell:
            return getattr(module, "gate", None) or module.router
    raise LookupError("the experts module has no router beside it")
