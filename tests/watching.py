"""An observer of a running engine that calls a function of a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tiermoe.engine.observer import Observer
from tiermoe.types import Routed


class OnRoute(Observer):
    """Calls `note` with each layer's routing and its input, with gate weights where `weights` says so."""

    def __init__(self, note: Callable[[Routed, torch.Tensor], Any], weights: bool = False) -> None:
        self.on_route = note
        self.weights = weights
