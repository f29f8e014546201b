"""Fate: its preset; its boundary, from how often the next gate is right in each layer, and its windows, from times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from tiermoe.errors import TraceError
from tiermoe.lab.systems.ladder import Ladder
from tiermoe.lab.systems.routings import decode_passes, recall
from tiermoe.offload.composition import Composition

if TYPE_CHECKING:
    from tiermoe.lab.trace.file import Trace

PRESET = Composition(
    "fate",
    "next gate above a percentile, shallow layers first, ARC per layer, 2 bits for unpopular ones in prefill",
    "Fate (2025)",
    precision="popularity", prefetch="percentile", cache="arc", allotment="shallow", profile="fate",
    low_share=None,
)  # fmt: skip

LADDER = Ladder(
    "LoD, 16 bits",
    (
        ("prefetch", {"prefetch": "none"}),
        ("cache", {"cache": "none"}),
        ("quantisation", {"precision": "fixed", "low_share": 0, "bits": 16}),
    ),
)
"""Section 5.4, figure 14."""


def accuracies(trace: Trace) -> list[float]:
    """Accuracy of the next gate, layer by layer: the share of a decoded token's experts among the K that the layer's
    router chooses on the input of the layer before; 0 for the first layer, which nothing predicts. TraceError without
    forecasts."""
    if 1 not in trace.header.forecast_distances:
        raise TraceError(
            f"the trace of {trace.header.model} holds no forecasts of the next layer; make it again with tiermoe trace"
        )
    shares: list[list[float]] = [[] for _ in trace.header.experts]
    for passed in decode_passes(trace):
        for layer in range(1, len(passed.layers)):
            ranked = passed.layers[layer - 1].forecasts.get(1, [])
            for chosen in passed.layers[layer].experts:
                if ranked and chosen:
                    named = {expert for expert, _ in ranked[: trace.header.top_k[layer]]}
                    shares[layer].append(recall(named, chosen))
    return [fmean(layer) if layer else 0.0 for layer in shares]


def boundary(accuracy: Sequence[float]) -> int:
    """Number of shallow layers: those before the first layer that is predicted at least as well as the mean, at least
    the first layer, which is never predicted. The paper takes the boundary from the same figures (section 4.4, figure
    7) and gives no rule; this rule is ours."""
    if len(accuracy) < 2:
        return len(accuracy)
    mean = fmean(accuracy[1:])
    return next(layer for layer in range(1, len(accuracy)) if accuracy[layer] >= mean - 1e-12)


def windows(trace: Trace, bits: int, bandwidth: float) -> list[int]:
    """N_prefetch = floor(T_window / T_io) of each layer (Fate, section 4.3): T_window = T_moe + T_gate + T_attn is the
    layer's share of a decode pass, T_io the time of one expert of the next layer. 0 where no expert can be read
    meanwhile, and for the last layer. bandwidth: of the link, bytes per second. TraceError without times."""
    from tiermoe.lab.simulate.costs import expert_bytes  # late: listing the presets imports no simulator

    header = trace.header
    if header.times is None:
        raise TraceError(f"the trace of {header.model} holds no computing times; make it again with tiermoe trace")
    layers = len(header.experts)
    expert = header.times.expert[min(header.times.expert, key=lambda known: (abs(known - bits), known))]
    found = []
    for layer in range(layers - 1):
        t_window = header.times.dense / layers + header.top_k[layer] * expert
        t_io = expert_bytes(header, layer + 1, bits) / bandwidth
        found.append(math.floor(t_window / t_io))
    return [*found, 0]


def largest_share(losses: Sequence[tuple[float, float]], tolerated: float = 0.01) -> float:
    """The largest share before the first that loses `tolerated` or more, of (share, loss) pairs by rising share; 0
    where the first pair does."""
    found = 0.0
    for share, loss in losses:
        if loss >= tolerated:
            break
        found = share
    return found
