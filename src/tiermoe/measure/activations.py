"""How active an expert's neurons are: |act(W1 x)|, from the checkpoint's own weights (CORM, section 2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tiermoe.batch import Batch, prompt
from tiermoe.engine.engine import Engine
from tiermoe.engine.observer import Observer
from tiermoe.kernels.expert import Activation
from tiermoe.model.blueprint import Blueprint
from tiermoe.types import Routed

_MOST_VALUES = 16_000_000  # float32, held while theta is found
_TOKENS = (16, 256)  # sampled at least and at most


@dataclass(frozen=True, slots=True)
class Theta:
    """`theta`: the quantile of |act(W1 x)| below which `inactive` of the neurons lie; `active_share`: of each layer's
    neurons, above it. `tokens`: that were sampled."""

    theta: float
    active_share: list[float]
    tokens: int


@torch.inference_mode()
def find_theta(
    engine: Engine, blueprint: Blueprint, ids: torch.Tensor, inactive: float, progress: Callable[[int, int], None]
) -> Theta:
    """The threshold on a sample of tokens spread over the sequences `ids` (n, length) and their chosen experts, whose
    layers the neuron unit can take (`store.neurons.neuron_layer`)."""
    sample = _Sample(_positions(blueprint, ids.shape))
    engine.observe(sample)
    try:
        for row in ids:
            cache = engine.new_cache(1, len(row))
            engine.step(Batch((prompt(cache.open(), row.tolist()),)), cache)
    finally:
        engine.observe(None)
    activation = [gate.alone() for gate in engine.gates]
    layers = []
    for index in range(len(blueprint.layers)):
        layers.append(_magnitudes(blueprint, index, sample.by_expert(index), activation[index]))
        progress(index + 1, len(blueprint.layers))
    everything = torch.cat(layers)
    theta = float(everything.kthvalue(max(1, round(inactive * len(everything)))).values)
    shares = [float((values > theta).double().mean()) for values in layers]
    return Theta(theta, shares, len(ids) * len(sample.positions))


class _Sample(Observer):
    """The inputs of each layer at some positions of each sequence, with the experts that were chosen there."""

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
    """Positions of a sequence that are sampled, evenly spread, the last included."""
    sequences, length = shape
    each_token = sum(layer.top_k * layer.parts[1].shape[1] for layer in blueprint.layers)
    tokens = min(max(_MOST_VALUES // each_token, _TOKENS[0]), _TOKENS[1])
    count = min(max(tokens // sequences, 1), length)
    return [(index + 1) * length // count - 1 for index in range(count)]
