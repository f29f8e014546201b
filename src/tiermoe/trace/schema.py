"""Routing traces: what each router chose, pass by pass, with what predictors said of it. See docs/trace-format.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

VERSION = 1
HOLDS = ("weights", "forecasts", "counts", "little", "neurons", "tokens")
"""What a trace can hold beside the experts that were chosen."""


@dataclass(slots=True)
class LayerTrace:
    """One layer in one pass. `experts[t]`, `weights[t]`: the K experts and gate weights of token t, in the router's
    order; no tokens where the layer did not run. `forecasts`: distance d → the router of layer l + d on this layer's
    input, likeliest first (summed over the pass's tokens), with softmax weights. `counts`: of a prompt's pass, distance
    d → the experts that this router chooses, with how many tokens choose each, most first. `neurons`: expert → its
    active neurons as a bit set (neuron j is bit j), where recorded; `named`: those that would be, by the layer before's
    input."""

    experts: list[list[int]]
    weights: list[list[float]]
    forecasts: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    neurons: dict[int, int] = field(default_factory=dict)
    named: dict[int, int] = field(default_factory=dict)
    counts: dict[int, list[tuple[int, float]]] = field(default_factory=dict)


@dataclass(slots=True)
class Little:
    """The little pass at the same position (MoBiLE): the probability of its likeliest next token, and its routing (all
    K that the router named, by falling weight)."""

    confidence: float
    layers: list[LayerTrace]


@dataclass(slots=True)
class Pass:
    """One forward pass. phase: 'prefill' or 'decode'; sequence: counted from 0; tokens: their ids, empty where they
    are unknown; layers: one entry per MoE layer of the model."""

    phase: str
    sequence: int
    tokens: list[int]
    layers: list[LayerTrace]
    little: Little | None = None

    @property
    def size(self) -> int:
        """How many tokens ran."""
        return max([len(self.tokens), *(len(layer.experts) for layer in self.layers)])


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds measured where the trace was made: `dense`, of everything but experts in one decode pass; `expert`: bits
    → of one expert on one token; `prefill_token`: of everything but experts per prompt token; `prefill_expert`: bits →
    of one expert per prompt token beyond its first."""

    dense: float
    expert: dict[int, float]
    prefill_token: float
    prefill_expert: dict[int, float]


@dataclass(frozen=True, slots=True)
class Header:
    """What a trace was made from and holds. `experts`, `top_k`: per layer. `expert_bytes`: bits → bytes of one expert
    per layer as it is stored, and read from a drive; `slot_bytes`: that it takes in memory; `copied_bytes`: that a copy
    to a GPU moves (of both, none: as many as stored). `times`: None where none were measured. `holds`: of `HOLDS`.
    `forecast_distances`: layers ahead. `head_bytes`, `neuron_bytes`, `neurons`: bytes of W1, of one neuron's rows, and
    neurons of an expert (0 where unknown). `neuron_slot_bytes`: bits → bytes of a slot of the neuron unit (none: as of
    whole experts). `dense_bytes`: of all that is no expert (0 where unknown). `encoder_layers`: how many of the MoE
    layers are an encoder's, the first ones. `made_from`: for people."""

    model: str
    fingerprint: str
    experts: Sequence[int]
    top_k: Sequence[int]
    expert_bytes: dict[int, list[int]]
    times: Times | None
    holds: frozenset[str]
    forecast_distances: Sequence[int] = ()
    head_bytes: int = 0
    neuron_bytes: int = 0
    neurons: int = 0
    dense_bytes: int = 0
    encoder_layers: int = 0
    made_from: dict[str, str | int | float] = field(default_factory=dict)
    slot_bytes: dict[int, list[int]] = field(default_factory=dict)
    copied_bytes: dict[int, list[int]] = field(default_factory=dict)
    neuron_slot_bytes: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Trace:
    """A whole trace in memory."""

    header: Header
    passes: list[Pass]
