"""Traces written by hand, for replays whose outcome is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiermoe.trace.schema import Header, LayerTrace, Pass, Times, Trace

EVERYTHING = frozenset({"weights", "forecasts", "counts", "little", "neurons", "tokens"})


def layer(*tokens: Sequence[int], **more: Any) -> LayerTrace:
    """A layer that routes each token to these experts, with falling weights that sum to 1."""
    weights = []
    for chosen in tokens:
        total = sum(range(1, len(chosen) + 1))
        weights.append([rank / total for rank in range(len(chosen), 0, -1)])
    return LayerTrace([list(chosen) for chosen in tokens], weights, **more)


def decode(*layers: LayerTrace, sequence: int = 0, **more: Any) -> Pass:
    """One decoded token."""
    return Pass("decode", sequence, [7], list(layers), **more)


def trace_of(
    passes: Sequence[Pass],
    experts: int = 4,
    top_k: int = 2,
    nbytes: int = 100,
    times: Times | None = None,
    holds: frozenset[str] = EVERYTHING,
    **more: Any,
) -> Trace:
    """A trace of layers that are all alike, at 4 bits, and half the bytes at 2."""
    layers = len(passes[0].layers)
    header = Header(
        "tiny", "abc", [experts] * layers, [top_k] * layers, {4: [nbytes] * layers, 2: [nbytes // 2] * layers},
        times, holds, **{"forecast_distances": [1]} | more,
    )  # fmt: skip
    return Trace(header, list(passes))
