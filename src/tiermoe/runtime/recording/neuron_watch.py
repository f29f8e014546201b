"""Which neurons of the experts that run are active: |act(W1 x)| > theta (CORM, section 3), by the weights that run."""

from __future__ import annotations

from typing import Any

import torch

from tiermoe.kernels.expert import separate_steps
from tiermoe.runtime.engine import engine_of
from tiermoe.runtime.observer import Observer
from tiermoe.tiers.neuron_sets import to_bits
from tiermoe.types import Ready, Routed


class NeuronWatch(Observer):
    """Looks at what comes out of the first matrix of a loaded model's experts while each token runs alone. ModelError
    where they are not W2 (act(W1 x) * W3 x)."""

    def __init__(self, model: Any, theta: float) -> None:
        engine: Any = engine_of(model)
        self._engine = engine
        self._theta = theta
        self._gates = [gate.alone() for gate in engine.gates]
        self._hidden: torch.Tensor | None = None
        self._chosen: set[int] = set()
        self.active: list[dict[int, int]] = []
        """Per layer, of the last pass: expert → its active neurons as a bit set (neuron j is bit j)."""
        self.begin()

    def begin(self) -> None:
        """Another pass begins."""
        self.active = [{} for _ in self._gates]

    def on_route(self, routed: Routed, hidden: torch.Tensor) -> None:
        self._hidden = hidden if len(hidden) == 1 else None
        self._chosen = {expert for token in routed.experts for expert in token}

    def on_ready(self, layer: int, ready: Ready) -> None:
        if self._hidden is None or ready.expert not in self._chosen:
            return
        kernel, views = self._engine.held(layer, ready)
        features = separate_steps(kernel).features(self._hidden, views)
        magnitudes = self._gates[layer](features.chunk(2, dim=-1)[0])[0].float().abs()
        # an undefined one is active, as in kernels.neurons
        self.active[layer][ready.expert] = to_bits(~(magnitudes <= self._theta).cpu())
