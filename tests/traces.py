"""Traces by hand."""

from __future__ import annotations

from collections.abc import Sequence

from tiermoe.trace.schema import Header, LayerTrace, Pass, Times, Trace

Rows = Sequence[Sequence[int]]


def layer(experts: Rows, weights: Sequence[Sequence[float]] | None = None, **more: object) -> LayerTrace:
    """One layer of a pass; equal weights where none are given."""
    even = [[1 / len(row) if row else 0.0 for _ in row] for row in experts]
    return LayerTrace([list(row) for row in experts], [list(row) for row in weights or even], **more)  # type: ignore[arg-type]


def decoded(*layers: LayerTrace, sequence: int = 0) -> Pass:
    """A pass over one generated token."""
    return Pass("decode", sequence, [0], list(layers))


def prompt(tokens: int, *layers: LayerTrace, sequence: int = 0) -> Pass:
    """A pass over a prompt."""
    return Pass("prefill", sequence, [0] * tokens, list(layers))


def trace(
    passes: list[Pass],
    experts: Sequence[int],
    top_k: Sequence[int],
    times: Times | None = None,
    distances: Sequence[int] = (),
    nbytes: dict[int, int] | None = None,
    encoder_layers: int = 0,
    holds: frozenset[str] = frozenset({"weights"}),
) -> Trace:
    """Of a model whose layers have `experts` experts of `nbytes` bytes (bits → bytes)."""
    sizes = {bits: [size] * len(experts) for bits, size in (nbytes or {4: 100, 2: 50}).items()}
    held = holds | ({"forecasts"} if distances else set())
    header = Header(
        "by hand", "", list(experts), list(top_k), sizes, times, frozenset(held), tuple(distances),
        encoder_layers=encoder_layers,
    )  # fmt: skip
    return Trace(header, passes)
