"""Statistics of a trace that papers draw."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean

from tiermoe.errors import TraceError
from tiermoe.lab.papers.prediction import RecallRow, recall_table
from tiermoe.lab.simulate.costs import expert_bytes, run_bits, slot_sizes
from tiermoe.lab.simulate.evictions import hits_of
from tiermoe.lab.systems.hobbit import Split
from tiermoe.lab.systems.routings import decode_passes, frequencies, halves, routings
from tiermoe.lab.trace.file import LayerTrace, Trace
from tiermoe.offload.policies.routing import is_confident

Statistic = Callable[[Trace], float]
ByLayer = Callable[[Trace], Sequence[float | None]]


def scores(t1: float, t2: float, part: str) -> Statistic:
    """The share of decoded tokens' experts that two thresholds make 'high', 'low' or 'skipped' (HOBBIT)."""
    return lambda trace: float(getattr(Split.of(trace, t1, t2), part))


def _mean(trace: Trace, values: Iterable[float], lacking: str) -> float:
    """TraceError where the trace holds no such values."""
    found = list(values)
    if not found:
        raise TraceError(f"the trace of {trace.header.model} holds no {lacking}; make it again with tiermoe trace")
    return fmean(found)


_SUCCESSIVE = "decoded tokens in a row"


def _successive(trace: Trace) -> Iterator[tuple[LayerTrace, LayerTrace]]:
    """(a layer of a decoded token, the same layer of the next token)."""
    passes = decode_passes(trace)
    for before, after in pairwise(passes):
        if before.sequence == after.sequence:
            for one, other in zip(before.layers, after.layers, strict=True):
                if one.experts and other.experts:
                    yield one, other


def first_is_used_again(trace: Trace) -> float:
    """How often the next token uses the expert that the router weighs highest for a token."""
    return _mean(trace, (one.experts[0][0] in other.experts[0] for one, other in _successive(trace)), _SUCCESSIVE)


def one_is_used_again(trace: Trace) -> float:
    """How often the next token uses at least one of a token's experts."""
    shared = (not set(one.experts[0]).isdisjoint(other.experts[0]) for one, other in _successive(trace))
    return _mean(trace, shared, _SUCCESSIVE)


def first_at_random(trace: Trace) -> float:
    """`first_is_used_again` where routing is even."""
    return fmean(k / e for k, e in zip(trace.header.top_k, trace.header.experts, strict=True))


def one_at_random(trace: Trace) -> float:
    """`one_is_used_again` where routing is even."""
    sizes = zip(trace.header.top_k, trace.header.experts, strict=True)
    return fmean(1 - math.comb(e - k, k) / math.comb(e, k) for k, e in sizes)


def _covered(counts: Iterable[int], share: float) -> float:
    """What the most frequent `share` of the kinds has of all occurrences. counts: of each kind."""
    ranked = sorted(counts, reverse=True)
    return sum(ranked[: math.ceil(share * len(ranked))]) / max(sum(ranked), 1)


def most_used(share: float, per_sequence: bool) -> Statistic:
    """The share of the tokens' choices that falls on a layer's most used experts, the mean over layers, within each
    sequence or over the whole text."""

    def of(trace: Trace) -> float:
        return fmean(_covered(row, share) for row in frequencies(trace))

    def count(trace: Trace) -> float:
        if not per_sequence:
            return of(trace)
        numbers = dict.fromkeys(passed.sequence for passed in trace.passes)
        parts = ([passed for passed in trace.passes if passed.sequence == number] for number in numbers)
        return fmean(of(Trace(trace.header, part)) for part in parts)

    return count


def paths_covered(share: float) -> Statistic:
    """The share of tokens whose path, their experts in all layers, is among the most frequent `share` of the paths."""
    return lambda trace: _covered(Counter(str(token) for token in routings(trace)).values(), share)


def popular_tokens(share: float) -> Statistic:
    """The share of a prompt's choices that falls on the least popular `share` of a layer's active experts (Fate)."""

    def count(trace: Trace) -> float:
        found = []
        for passed in trace.passes:
            for layer in passed.layers if passed.phase == "prefill" else ():
                counts = sorted(Counter(expert for chosen in layer.experts for expert in chosen).values())
                if counts:
                    found.append(sum(counts[: math.floor(share * len(counts))]) / sum(counts))
        return _mean(trace, found, "prompts")

    return count


def recall_of(predictor: str, distance: int = 1) -> Statistic:
    """The share of decoded tokens' experts that a predictor of `recall_table` names, the mean over layers."""
    return lambda trace: fmean(row.recall for row in _rows(trace, predictor, distance))


def recall_by_layer(predictor: str) -> ByLayer:
    """The same for each layer, of the next layer; None for layers that nothing predicts."""

    def count(trace: Trace) -> list[float | None]:
        found = {row.layer: row.recall for row in _rows(trace, predictor, 1)}
        return [found.get(layer) for layer in range(len(trace.header.experts))]

    return count


def _rows(trace: Trace, predictor: str, distance: int) -> list[RecallRow]:
    """What is counted on one half of the sequences is judged on the other."""
    rows = [row for row in recall_table(*halves(trace), only=predictor) if row.distance == distance]
    if not rows:
        raise TraceError(f"the trace of {trace.header.model} holds nothing that {predictor} names {distance} on by")
    return rows


def first_predicted(distance: int) -> Statistic:
    """How often the expert that a later layer's router, asked beforehand, weighs highest is the one that it then weighs
    highest."""

    def count(trace: Trace) -> float:
        right = [
            layer.forecasts[distance][0][0] == passed.layers[number + distance].experts[0][0]
            for passed in decode_passes(trace)
            for number, layer in enumerate(passed.layers[:-distance])
            if layer.forecasts.get(distance) and passed.layers[number + distance].experts
        ]
        return _mean(trace, right, f"forecasts {distance} layers on")

    return count


def _by_layer(trace: Trace, values: Callable[[LayerTrace], Iterable[float]]) -> list[float | None]:
    """The mean of values of decoded tokens, by layer; None for a layer without any."""
    found: list[list[float]] = [[] for _ in trace.header.experts]
    for passed in decode_passes(trace):
        for each, layer in zip(found, passed.layers, strict=True):
            each += values(layer)
    return [fmean(each) if each else None for each in found]


def first_weight(trace: Trace) -> list[float | None]:
    """The share of a token's gate weight that its first expert has, by layer."""
    return _by_layer(trace, lambda layer: (row[0] / sum(row) for row in layer.weights if row and sum(row)))


def fallback_ratio(gamma: float) -> Statistic:
    """The share of decoded tokens whose little pass is not sure enough (MoBiLE's r)."""

    def count(trace: Trace) -> float:
        sure = (is_confident(passed.little.confidence, gamma) for passed in decode_passes(trace) if passed.little)
        return 1 - _mean(trace, sure, "little pass")

    return count


def hits(policy: str, share: float) -> Statistic:
    """The hit rate of an eviction policy alone, with slots for a share of the experts in one pool."""

    def count(trace: Trace) -> float:
        slots = max(1, int(share * sum(trace.header.experts)))
        return float(hits_of(trace, policy, slots, run_bits(trace.header)).headline_hit_rate or 0.0)

    return count


def inactive_neurons(trace: Trace) -> list[float | None]:
    """The share of the neurons of decoded tokens' experts that theta makes inactive, by layer (CORM)."""
    neurons = trace.header.neurons
    return _by_layer(trace, lambda layer: (1 - active.bit_count() / neurons for active in layer.neurons.values()))


def memory_saved(share: float, bits: int) -> Statistic:
    """How many times the memory with every expert at 16 bits takes is that with a share of them in `bits`, both with
    all that is no expert."""

    def count(trace: Trace) -> float:
        header = trace.header
        if not header.dense_bytes:
            raise TraceError(f"the trace of {header.model} holds no bytes of what is no expert; make it again")
        sizes = slot_sizes(header, [16, bits])
        everything = sum(header.experts) * sizes[16]
        return (header.dense_bytes + everything) / (header.dense_bytes + share * sum(header.experts) * sizes[bits])

    return count


def bytes_moved(bits: int) -> Statistic:
    """Bytes of an expert of the first layer at 16 bits over those in `bits`."""
    return lambda trace: expert_bytes(trace.header, 0, 16) / expert_bytes(trace.header, 0, bits)
