"""A recorded trace's routing as weights: a model of random weights whose routers choose what a trace recorded.

The routers of random weights send all tokens to nearly the same experts. Here each token of the trace has a class, and
token id t has class t mod `classes`. A class has a column of the hidden states to itself, in each of `GROUPS` groups of
columns: the embedding writes it, no layer writes there, and the routers read nothing else. So the ids 0, 1, 2, … run
the trace, in whatever engine, without touching the engine's code. Layer l's norm passes group l mod `GROUPS` alone;
what router l has for the other groups is what a forecast from the layers before sees, right in a share `recall`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tiermoe.errors import ConfigError, TraceError
from tiermoe.lab.trace import LayerTrace, Pass, Trace, read_trace

Floats = npt.NDArray[np.float32]

GROUPS = 4  # forecasts reach three layers ahead, as HOBBIT looks
RECALL = 0.8
AMPLITUDE = 4.0  # of a class's columns, where other columns of an embedding have a deviation of 1
_MULTIPLE = 256  # columns of a block
_ADDS = re.compile(r"\.(o_proj|down_proj|w2)\.(weight|bias)$|layernorm\.bias$")  # to the hidden states
_NORM_OR_ROUTER = re.compile(r"model\.layers\.(\d+)\.(post_attention_layernorm|(mlp|block_sparse_moe)\.gate)\.weight")


@dataclass(frozen=True)
class Routing:
    """chosen: [class][MoE layer] → expert → gate weight as recorded, 0 of experts that were drawn. forecast: the same,
    by the distance from the layer that forecasts, from 1 on. prompt: how many classes, the first ones, were the
    trace's prompt. popularity: [MoE layer][expert], times chosen and one."""

    trace: Trace
    chosen: list[list[dict[int, float]]]
    forecast: dict[int, list[list[dict[int, float]]]]
    prompt: int

    @property
    def classes(self) -> int:
        return len(self.chosen)

    @property
    def columns(self) -> int:
        """Columns of the hidden states that only the embedding writes, the first ones: whole blocks."""
        return -(-GROUPS * self.classes // _MULTIPLE) * _MULTIPLE

    def norm(self, layer: int, hidden: int) -> Floats:
        """The norm (H,) before the router of MoE layer `layer`."""
        gains = np.ones(hidden, np.float32)
        for group in range(GROUPS):
            if group != layer % GROUPS:
                gains[group * self.classes : (group + 1) * self.classes] = 0
        return gains

    def router(self, layer: int, hidden: int) -> Floats:
        """The matrix (E, H) of the router of MoE layer `layer`."""
        matrix = np.zeros((self.trace.header.experts[layer], hidden), np.float32)
        for group in range(GROUPS):
            distance = (layer - group) % GROUPS
            table = self.forecast[distance] if distance else self.chosen
            for each in range(self.classes):
                for expert, weight in table[each][layer].items():
                    matrix[expert, group * self.classes + each] = 1 + weight
        return matrix

    def codes(self, vocabulary: int) -> npt.NDArray[np.int64]:
        """The columns (V, GROUPS) that are not 0 in each token's embedding."""
        classes = np.arange(vocabulary) % self.classes
        return classes[:, None] + self.classes * np.arange(GROUPS)

    def tokens(self, count: int, first: int = 0) -> list[int]:
        """`count` token ids from class `first` on, from the first class again after the last."""
        return [token % self.classes for token in range(first, first + count)]

    def passes(self, prompt: Sequence[int], decoded: Sequence[int]) -> Trace:
        """The trace of a prompt and decoded tokens, which the simulator replays."""
        passes = [Pass("prefill", 0, [], [self._of(prompt, layer) for layer in self._layers])]
        passes += [Pass("decode", 0, [], [self._of([token], layer) for layer in self._layers]) for token in decoded]
        top_k = [len(each) for each in self.chosen[0]]
        return Trace(replace(self.trace.header, top_k=top_k, holds=frozenset({"weights"})), passes)

    @property
    def _layers(self) -> range:
        return range(len(self.trace.header.experts))

    def _of(self, tokens: Sequence[int], layer: int) -> LayerTrace:
        chosen = [self.chosen[token % self.classes][layer] for token in tokens]
        return LayerTrace([list(each) for each in chosen], [list(each.values()) for each in chosen])


def routing_of(trace: Trace, layers: int, experts: int, top_k: int, recall: float = RECALL, seed: int = 0) -> Routing:
    """The routing of a trace's first prompt and of what was decoded after it, in a model of so many MoE layers (the
    first ones of the trace), experts and experts a token. Where the trace has fewer experts a token, the others are
    drawn by the layer's popularity. TraceError where the trace is of another model."""
    header = trace.header
    if layers > len(header.experts):
        raise TraceError(f"{header.model}'s trace has {len(header.experts)} MoE layers, the model {layers}")
    if set(header.experts[:layers]) != {experts}:
        raise TraceError(f"{header.model}'s trace has {header.experts[0]} experts a layer, the model {experts}")
    if max(header.top_k[:layers]) > top_k:
        raise TraceError(f"{header.model}'s trace has {max(header.top_k)} experts a token, the model {top_k}")
    draw = random.Random(seed)
    passes = [each for each in trace.passes if each.sequence == trace.passes[0].sequence]
    prompt = passes[0].size if passes[0].phase == "prefill" else 0
    popularity = [[1] * experts for _ in range(layers)]
    recorded: list[list[dict[int, float]]] = []
    for each in passes:
        tokens: list[list[dict[int, float]]] = [[{} for _ in range(layers)] for _ in range(each.size)]
        for layer, found in enumerate(each.layers[:layers]):  # a prompt's last layer runs for its last token alone
            for token, chosen, weights in zip(tokens[::-1], found.experts[::-1], found.weights[::-1], strict=False):
                token[layer] = dict(zip(chosen, weights, strict=True))
                for expert in chosen:
                    popularity[layer][expert] += 1
        recorded += tokens

    def filled(kept: dict[int, float], layer: int) -> dict[int, float]:
        found = dict(kept)
        while len(found) < top_k:
            found.setdefault(draw.choices(range(experts), popularity[layer])[0], 0.0)
        return found

    chosen = [[filled(each, layer) for layer, each in enumerate(token)] for token in recorded]
    forecast = {
        distance: [
            [
                filled({e: w for e, w in each.items() if draw.random() < recall}, layer)
                for layer, each in enumerate(token)
            ]
            for token in chosen
        ]
        for distance in range(1, GROUPS)
    }
    first = replace(
        header,
        experts=header.experts[:layers],
        top_k=[top_k] * layers,
        expert_bytes={bits: sizes[:layers] for bits, sizes in header.expert_bytes.items()},
    )
    return Routing(Trace(first, passes), chosen, forecast, prompt)


def experts_of(config: Mapping[str, Any]) -> int:
    """Experts of a layer."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next(int(config[name]) for name in names if name in config)


def dense_layers(config: Mapping[str, Any]) -> int:
    """Layers without experts, the first ones."""
    return int(config.get("first_k_dense_replace", 0))


def routing_for(path: Path, config: Mapping[str, Any], recall: float = RECALL, seed: int = 0) -> Routing:
    """The routing of the trace at `path` in a model. TraceError if it is another model's, ConfigError if it has too
    many tokens for the hidden size."""
    layers = config["num_hidden_layers"] - dense_layers(config)
    routing = routing_of(read_trace(path), layers, experts_of(config), config["num_experts_per_tok"], recall, seed)
    if routing.columns > config["hidden_size"] // 2:
        raise ConfigError(f"{path} has {routing.classes} tokens, too many for a hidden size of {config['hidden_size']}")
    return routing


def routed(value: torch.Tensor, name: str, config: Mapping[str, Any], routing: Routing) -> torch.Tensor:
    """A tensor of a checkpoint with a recorded routing; of others the value itself. The family calls its routers
    `mlp.gate`, or as Mixtral does."""
    if name == "model.embed_tokens.weight":
        value[:, : routing.columns] = 0
        return value.scatter_(1, torch.from_numpy(routing.codes(len(value))), AMPLITUDE)
    if _ADDS.search(name):
        value[: routing.columns] = 0
    elif name.endswith("e_score_correction_bias"):
        value[:] = 0
    elif found := _NORM_OR_ROUTER.fullmatch(name):
        layer, hidden = int(found[1]) - dense_layers(config), config["hidden_size"]
        if layer >= 0:
            made = routing.norm(layer, hidden) if "norm" in found[2] else routing.router(layer, hidden)
            return torch.from_numpy(made).bfloat16()
    return value
