"""Which neurons of the experts that run are active: |act(W1 x)| > theta (CORM, section 3), by the weights that run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tiermoe.kernels.expert import Activation, separate_steps
from tiermoe.runtime.engine import engine_of
from tiermoe.tiers.neuron_sets import to_bits
from tiermoe.types import Ready, Routed


class NeuronWatch:
    """Looks between the two matrices of a loaded model's experts while each token runs alone. ModelError where they are
    not W2 (act(W1 x) * W3 x). Close it."""

    def __init__(self, model: Any, theta: float) -> None:
        self._theta = theta
        engine: Any = engine_of(model)
        self._current = engine.current
        self._run_layer = self._current.run_layer
        self.active: list[dict[int, int]] = [{} for _ in engine.layers]
        """Per layer, of the last pass: expert → its active neurons as a bit set (neuron j is bit j)."""
        gates = [gate.alone() for gate in engine.gates]
        self._layer, self._expert = 0, 0
        self._watched: list[tuple[Any, Activation]] = []
        self._kernels: list[tuple[dict[int, Any], dict[int, Any]]] = []
        self._current.run_layer = self._following
        for layer, gate in zip(engine.layers, gates, strict=True):
            run: Any = layer.run
            kernels = run._kernels
            self._kernels.append((kernels, dict(kernels)))
            for bits, kernel in self._kernels[-1][1].items():
                steps = kernels[bits] = separate_steps(kernel)
                self._watched.append((steps, steps._activation))
                steps._activation = self._looking(gate, steps._activation)

    def begin(self) -> None:
        """Another pass begins."""
        self.active = [{} for _ in self.active]

    def close(self) -> None:
        """Leaves the model as it was."""
        del self._current.run_layer
        for kernel, activation in self._watched:
            kernel._activation = activation
        for kernels, before in self._kernels:
            kernels.update(before)

    def _following(self, routed: Routed, hidden: torch.Tensor) -> Iterator[Ready]:
        self._layer = routed.layer
        for ready in self._run_layer(routed, hidden):
            self._expert = ready.expert
            yield ready._replace(more=False)  # each by itself, so that it is known whose activations are seen

    def _looking(self, gate: Activation, activation: Activation) -> Activation:
        def looked_at(features: torch.Tensor) -> torch.Tensor:
            if len(features) == 1:
                magnitudes = gate(features.chunk(2, dim=-1)[0])[0].float().abs()
                # an undefined one is active, as in kernels.neurons
                self.active[self._layer][self._expert] = to_bits(~(magnitudes <= self._theta).cpu())
            return activation(features)

        return looked_at
