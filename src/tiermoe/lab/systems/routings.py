"""Statistics of a trace: its routing token by token, frequencies of experts, and recall of a prediction."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from tiermoe.errors import TraceError

if TYPE_CHECKING:
    from tiermoe.lab.trace.file import Pass, Trace


def routings(trace: Trace) -> Iterator[list[list[int]]]:
    """Each token's experts in every MoE layer. An encoder's layers are empty: the tokens that it reads are re-batched
    by expert and have no path of their own."""
    for passed in trace.passes:
        yield from _tokens_of(passed, trace.header.encoder_layers)


def _tokens_of(passed: Pass, encoder_layers: int) -> Iterator[list[list[int]]]:
    decoder = passed.layers[encoder_layers:]
    for token in range(max((len(layer.experts) for layer in decoder), default=0)):
        chosen = [layer.experts[token] if token < len(layer.experts) else [] for layer in decoder]
        yield [[] for _ in range(encoder_layers)] + chosen


def frequencies(trace: Trace) -> list[list[int]]:
    """Number of tokens that each expert served, a row per MoE layer."""
    counts = [[0] * experts for experts in trace.header.experts]
    for passed in trace.passes:
        for row, layer in zip(counts, passed.layers, strict=True):
            for chosen in layer.experts:
                for expert in chosen:
                    row[expert] += 1
    return counts


def halves(trace: Trace) -> tuple[Trace, Trace]:
    """The even sequences of a trace, and the odd ones, so that a result of one half is judged on the other. TraceError
    where there is one sequence."""
    even, odd = (
        replace(trace, passes=[passed for passed in trace.passes if passed.sequence % 2 == first]) for first in (0, 1)
    )
    if not odd.passes:
        raise TraceError(
            f"the trace of {trace.header.model} holds one sequence, and what is found on one is judged on another; "
            f"record more: raise --tokens, or lower --sequence"
        )
    return even, odd


def decode_passes(trace: Trace) -> list[Pass]:
    """The passes over one generated token."""
    return [passed for passed in trace.passes if passed.phase == "decode"]


def recall(named: Collection[int], chosen: Collection[int]) -> float:
    """Share (0 to 1) of the router's experts that a prediction had named. ValueError where none was chosen."""
    if not chosen:
        raise ValueError("recall needs at least one chosen expert")
    named = set(named)
    return sum(expert in named for expert in chosen) / len(chosen)


def baseline_uniform(k: int, e: int) -> float:
    """Expected recall of K experts named at random of E."""
    return k / e
