"""How active an expert's neurons are, |act(W1 x)| (CORM): theta, the threshold that leaves a share of them inactive,
from the checkpoint's own weights (section 2); and the neurons above it while a model runs (section 3)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiermoe.batch import Batch, prompt
from tiermoe.engine.engine import Engine, engine_of
from tiermoe.engine.observer import Observer
from tiermoe.kernels.experts import unfused
from tiermoe.kernels.gates import Activation
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.offload.neurons import to_bits
from tiermoe.types import Ready, Routed

_MOST_VALUES = 16_000_000  # float32 values in memory while theta is searched
_TOKENS = (16, 256)  # sampled at least and at most


@dataclass(frozen=True, slots=True)
class Theta:
    """A threshold for the activity of neurons."""

    theta: float  # the quantile of |act(W1 x)| below which the inactive neurons lie
    active_share: list[float]  # of each layer's neurons, above theta
    tokens: int  # that were sampled


@torch.inference_mode()
def find_theta(
    engine: Engine, blueprint: Blueprint, ids: torch.Tensor, inactive: float, progress: Callable[[int, int], None]
) -> Theta:
    """The theta below which the share `inactive` of the neurons lie, on a sample of tokens spread over the sequences
    `ids` (n, length) and their chosen experts. The neuron unit must take every layer
    (`formats.neurons.neuron_layer`)."""
    sample = _InputSample(_positions(blueprint, ids.shape))
    engine.observe(sample)
    try:
        for row in ids:
            cache = engine.new_cache(1, len(row))
            engine.step(Batch((prompt(cache.open(), row.tolist()),)), cache)
    finally:
        engine.observe(None)
    activation = [gate.require_elementwise() for gate in engine.gates]
    layers = []
    for index in range(len(blueprint.layers)):
        layers.append(_magnitudes(blueprint, index, sample.by_expert(index), activation[index]))
        progress(index + 1, len(blueprint.layers))
    everything = torch.cat(layers)
    theta = float(everything.kthvalue(max(1, round(inactive * len(everything)))).values)
    shares = [float((values > theta).double().mean()) for values in layers]
    return Theta(theta, shares, len(ids) * len(sample.positions))


class _InputSample(Observer):
    """Inputs of each layer at some positions of each sequence, with the experts that were chosen there."""

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = list(positions)
        self._seen: dict[int, list[tuple[torch.Tensor, list[list[int]]]]] = defaultdict(list)

    def on_route(self, routed: Routed, hidden: torch.Tensor) -> None:
        chosen = [list(routed.experts[position]) for position in self.positions]
        self._seen[routed.layer].append((hidden[self.positions].float().cpu(), chosen))

    def by_expert(self, layer: int) -> dict[int, torch.Tensor]:
        """Expert → inputs (n, H) of the sampled tokens that chose it."""
        rows: dict[int, list[torch.Tensor]] = defaultdict(list)
        for hidden, chosen in self._seen.pop(layer):
            for row, experts in zip(hidden, chosen, strict=True):
                for expert in experts:
                    rows[expert].append(row)
        return {expert: torch.stack(rows[expert]) for expert in sorted(rows)}


def _magnitudes(
    blueprint: Blueprint,
    layer: int,
    inputs: dict[int, torch.Tensor],
    activation: Activation,
) -> torch.Tensor:
    name = blueprint.layers[layer].parts[0].name
    found = []
    for expert, hidden in inputs.items():
        gate, _ = blueprint.experts.read(layer, expert)[name].float().chunk(2)
        found.append(activation(hidden @ gate.t()).abs().flatten())
    return torch.cat(found)


def _positions(blueprint: Blueprint, shape: torch.Size) -> list[int]:
    """Positions of a sequence to sample, evenly spread, the last one included."""
    sequences, length = shape
    each_token = sum(layer.top_k * layer.parts[1].shape[1] for layer in blueprint.layers)
    tokens = min(max(_MOST_VALUES // each_token, _TOKENS[0]), _TOKENS[1])
    count = min(max(tokens // sequences, 1), length)
    return [(index + 1) * length // count - 1 for index in range(count)]


class NeuronWatch(Observer):
    """Active neurons of a running model: what comes out of the first matrix of its experts while each token runs alone.
    ModelError where they are not W2 (act(W1 x) * W3 x)."""

    def __init__(self, model: Any, theta: float) -> None:
        engine: Any = engine_of(model)
        self._engine = engine
        self._theta = theta
        self._gates = [gate.require_elementwise() for gate in engine.gates]
        self._hidden: torch.Tensor | None = None
        self._before: torch.Tensor | None = None  # of the layer before
        self._chosen: set[int] = set()
        self.active: list[dict[int, int]] = []
        """Per layer, of the last pass: expert → its active neurons as a bit set (neuron j is bit j)."""
        self.named: list[dict[int, int]] = []
        """Those that would be active if the layer ran on the layer before's input, which is what predicts them."""
        self.start_pass()

    def start_pass(self) -> None:
        """Another pass begins."""
        self.active = [{} for _ in self._gates]
        self.named = [{} for _ in self._gates]
        self._hidden = None

    def on_route(self, routed: Routed, hidden: torch.Tensor) -> None:
        self._before = self._hidden
        self._hidden = hidden.clone() if len(hidden) == 1 else None
        self._chosen = {expert for token in routed.experts for expert in token}

    def on_ready(self, layer: int, ready: Ready) -> None:
        if self._hidden is None or ready.expert not in self._chosen:
            return
        kernel, views = self._engine.layers[layer].computes(ready)
        features = unfused(kernel).features

        def above(hidden: torch.Tensor) -> int:
            magnitudes = self._gates[layer](features(hidden, views).chunk(2, dim=-1)[0])[0].float().abs()
            return to_bits(~(magnitudes <= self._theta).cpu())  # an undefined one is active, as in kernels.neurons

        self.active[layer][ready.expert] = above(self._hidden)
        if self._before is not None:
            self.named[layer][ready.expert] = above(self._before)
