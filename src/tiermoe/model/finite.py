"""Looks for the layer whose values are not finite, in a step that has given logits that are none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


class NotFiniteError(Exception):
    """A layer has given infinite values, or none that are numbers. The text is its name."""


def require_finite(name: str, *values: Tensor) -> None:
    """NotFiniteError where some of the values are not finite."""
    if not all(bool(torch.isfinite(each).all()) for each in values):
        raise NotFiniteError(name)


class FiniteLayer:
    """A decoder's layer that requires what it gives to be finite."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, x: Tensor, index: int, step: Any) -> Tensor:
        found: Tensor = self._layer(x, index, step)
        require_finite(f"layer {index}", found)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def apart(self, xs: Any, index: int, steps: Any) -> list[Tensor]:
        found: list[Tensor] = self._layer.apart(xs, index, steps)
        require_finite(f"layer {index}", *found)
        return found


def watch_modules(model: torch.nn.Module) -> Callable[[], None]:
    """Requires what the layers of a transformers model give to be finite; returns what ends that."""
    handles = []
    for name, layers in model.named_modules():
        if isinstance(layers, torch.nn.ModuleList):
            for index, layer in enumerate(layers):
                handles.append(layer.register_forward_hook(partial(_look, f"{name}.{index}")))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _look(name: str, _: Any, __: Any, output: Any) -> None:
    first = output[0] if isinstance(output, tuple) else output
    if isinstance(first, Tensor):
        require_finite(name, first)
