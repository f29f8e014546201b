"""Traces written by hand, and their replays over a link on which one expert takes a second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiermoe.config import CacheSize
from tiermoe.lab.simulate import ReplaySettings, Result, replay
from tiermoe.lab.trace import Header, LayerTrace, Pass, Times, Trace, TraceWriter
from tiermoe.offload.presets import compose

EVERYTHING = frozenset({"weights", "forecasts", "counts", "little", "neurons", "tokens"})


def layer(*tokens: Sequence[int], weights: list[list[float]] | None = None, **more: Any) -> LayerTrace:
    """A layer that routes each token to these experts; None: with falling weights that sum to 1."""
    if weights is None:
        ranks = [range(len(chosen), 0, -1) for chosen in tokens]
        weights = [[rank / sum(row) for rank in row] for row in ranks]
    return LayerTrace([list(chosen) for chosen in tokens], weights, **more)


def decode(*layers: LayerTrace, sequence: int = 0, **more: Any) -> Pass:
    """One decoded token."""
    return Pass("decode", sequence, [7], list(layers), **more)


def prompt(*layers: LayerTrace, sequence: int = 0) -> Pass:
    """A prompt of as many tokens as its longest layer routes."""
    return Pass("prefill", sequence, [7] * max(len(each.experts) for each in layers), list(layers))


def trace_of(
    passes: Sequence[Pass],
    experts: int = 4,
    top_k: int = 2,
    nbytes: int = 100,
    times: Times | None = None,
    holds: frozenset[str] = EVERYTHING,
    layers: int | None = None,
    **more: Any,
) -> Trace:
    """A trace of layers that are all alike, at 4 bits, and half the bytes at 2. layers: None: as the passes have."""
    layers = layers or len(passes[0].layers)
    header = Header(
        "tiny", "abc", [experts] * layers, [top_k] * layers, {4: [nbytes] * layers, 2: [nbytes // 2] * layers},
        times, holds, **{"forecast_distances": [1]} | more,
    )  # fmt: skip
    return Trace(header, list(passes))


TIMES = Times(dense=0.5, expert={4: 0.4}, prefill_token=0.1, prefill_expert={4: 0.05})


def write_trace(path: Path, trace: Trace) -> Path:
    """`path`, to which the trace is written."""
    with TraceWriter(path, trace.header) as writer:
        for passed in trace.passes:
            writer.add(passed)
    return path


def replayed(trace: Trace, preset: str = "lru", slots: int = 4, **options: Any) -> Result:
    """100 bytes a second: one expert of `trace_of` takes one second."""
    changes = options.pop("changes", {})
    nbytes = slots * trace.header.expert_bytes[4][0]
    given = {"bandwidth": 100.0, "times": TIMES} | options
    return replay(trace, compose(preset, changes), ReplaySettings(CacheSize(nbytes=nbytes), **given))
