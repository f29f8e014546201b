"""Statistics of a trace: its routing token by token, frequencies of experts, how right each predictor is, and what
papers draw. What needs the simulator imports it: presets are listed without it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from tiermoe.errors import TraceError
from tiermoe.lab.trace import Header, LayerTrace, Pass, Trace, frequencies
from tiermoe.offload.policies.prediction import PredictionContext, Predictor, count_paths
from tiermoe.offload.policies.prediction.baselines import MostFrequent
from tiermoe.offload.policies.prediction.gates import NextGate, Recalled
from tiermoe.offload.policies.prediction.path import ActivationPath
from tiermoe.offload.policies.prediction.percentile import AbovePercentile
from tiermoe.offload.policies.routing import is_confident


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


Statistic = Callable[[Trace], float]
ByLayer = Callable[[Trace], Sequence[float | None]]


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


def _first(layer: LayerTrace) -> int | None:
    """The expert that a decoded token's router weighs highest; None if the layer did not run."""
    return layer.experts[0][0] if layer.experts and layer.experts[0] else None


def paths_covered(share: float, apart: int = 0) -> Statistic:
    """The share of decoded tokens' paths that are among the most frequent `share` of the paths that occur. A path is
    the first expert of each of three layers in a row, as long as the keys and values of EdgeMoE's dictionary (section
    3.3.2). apart: each layer of a path is of a token so many later, so that nothing but the layers' own frequencies
    counts. TraceError if no path occurs twice: the share is then that of any model."""

    def count(trace: Trace) -> float:
        tokens = [[*map(_first, passed.layers)] for passed in decode_passes(trace)]
        paths = Counter[tuple[int | None, ...]]()
        for number in range(len(tokens)):
            three = [tokens[(number + apart * place) % len(tokens)] for place in range(3)]
            for layer in range(trace.header.encoder_layers, len(trace.header.experts) - 2):
                path = [token[layer + place] for place, token in enumerate(three)]
                if None not in path:
                    paths[layer, *path] += 1
        if max(paths.values(), default=1) == 1:
            raise TraceError(
                f"no path occurs twice in the trace of {trace.header.model}, so that {share:.0%} of the paths have "
                f"{share:.0%} of the tokens whatever the routing; record a longer one with tiermoe trace"
            )
        return _covered(paths.values(), share)

    return count


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


def recalls(counted: Trace, judged: Trace, predictor: str) -> dict[tuple[int, int], float]:
    """(layer, layers before, at which the predictor named experts) → mean share of a decoded token's experts that were
    among those named. predictor: next-gate, percentile (Fate's 75th), path 1 and path 2 (their K likeliest), recalled
    (MoBiLE's little pass at the same position, which knows every layer beforehand: distance 1), frequent. counted: what
    paths and frequencies are of. Empty if the traces hold nothing that it names by."""
    from tiermoe.lab.simulate.steps import RecordedForecasts, Step

    header, found = judged.header, defaultdict[tuple[int, int], list[float]](list)
    prediction = _predictor(counted, header, predictor)
    if prediction is None:
        return {}
    most = header.top_k if predictor.startswith("path") else header.experts  # a path ranks all that it has seen
    for passed in decode_passes(judged):
        recalled = passed.little.layers if passed.little and predictor == "recalled" else None
        step = Step(passed.phase, passed.sequence, passed.size, passed.tokens, passed.layers, recalled)
        forecasts = RecordedForecasts(step)
        for layer in step.running:
            forecasts.layer = layer
            prediction.observe(step.routed(layer))
            named: dict[int, list[int]] = defaultdict(list)
            for wanted in prediction.candidates(layer, forecasts, lambda target, expert: False):
                named[wanted.layer].append(wanted.expert)
            for target, experts in named.items():
                if chosen := passed.layers[target].experts[0]:
                    found[target, target - layer].append(recall(experts[: most[target]], chosen))
    return {cell: fmean(shares) for cell, shares in sorted(found.items())}


def _predictor(counted: Trace, header: Header, name: str) -> Predictor | None:
    used = {(layer, e): n for layer, row in enumerate(frequencies(counted)) for e, n in enumerate(row)}
    context = PredictionContext(
        len(header.experts), header.experts, header.top_k, frequencies=used, encoder_layers=header.encoder_layers
    )
    if name == "frequent":
        return MostFrequent(context)
    if name.startswith("path"):
        order = int(name.split()[1])
        paths = count_paths(routings(counted), order)
        return ActivationPath(replace(context, paths=paths), path=order) if paths else None
    if name == "recalled":
        return Recalled(context) if "little" in header.holds else None
    if not header.forecast_distances:
        return None
    return AbovePercentile(context) if name == "percentile" else NextGate(context, ahead=max(header.forecast_distances))


def recall_of(predictor: str, distance: int = 1) -> Statistic:
    """The share of decoded tokens' experts that a predictor of `recalls` names, the mean over layers."""
    return lambda trace: fmean(_judged(trace, predictor, distance).values())


def recall_by_layer(predictor: str) -> ByLayer:
    """The same for each layer, of the next layer; None for layers that nothing predicts."""

    def count(trace: Trace) -> list[float | None]:
        found = _judged(trace, predictor, 1)
        return [found.get(layer) for layer in range(len(trace.header.experts))]

    return count


def _judged(trace: Trace, predictor: str, distance: int) -> dict[int, float]:
    """By layer. What is counted on one half of the sequences is judged on the other."""
    found = recalls(*halves(trace), predictor)
    rows = {layer: share for (layer, before), share in found.items() if before == distance}
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


def hits(policy: str, share: float, **settings: str) -> Statistic:
    """The hit rate of an eviction policy alone, with slots for a share of the experts in one pool. settings: its
    own."""

    def count(trace: Trace) -> float:
        from tiermoe.lab.simulate.costs import run_bits
        from tiermoe.lab.simulate.evictions import hits_of

        slots = max(1, int(share * sum(trace.header.experts)))
        return float(hits_of(trace, policy, slots, run_bits(trace.header), settings).headline_hit_rate or 0.0)

    return count


def inactive_neurons(trace: Trace) -> list[float | None]:
    """The share of the neurons of decoded tokens' experts that theta makes inactive, by layer (CORM)."""
    neurons = trace.header.neurons
    return _by_layer(trace, lambda layer: (1 - active.bit_count() / neurons for active in layer.neurons.values()))


def memory_saved(share: float, bits: int) -> Statistic:
    """How many times the memory with every expert at 16 bits takes is that with a share of them in `bits`, both with
    all that is no expert."""

    def count(trace: Trace) -> float:
        from tiermoe.lab.simulate.costs import slot_sizes

        header = trace.header
        if not header.dense_bytes:
            raise TraceError(f"the trace of {header.model} holds no bytes of what is no expert; make it again")
        sizes = slot_sizes(header, [16, bits])
        everything = sum(header.experts) * sizes[16]
        return (header.dense_bytes + everything) / (header.dense_bytes + share * sum(header.experts) * sizes[bits])

    return count


def windows(trace: Trace, bits: int, bandwidth: float, latency: float = 0.0) -> list[int]:
    """N_prefetch = floor(T_window / T_io) of each layer (Fate, section 4.3): T_window = T_moe + T_gate + T_attn is the
    layer's share of a decode pass, T_io the time of one expert of the next layer. 0 where no expert can be read
    meanwhile, and for the last layer. bandwidth: of the link, bytes per second. latency: of a transfer, seconds.
    TraceError without times."""
    from tiermoe.lab.simulate.costs import expert_bytes

    header = trace.header
    if header.times is None:
        raise TraceError(f"the trace of {header.model} holds no computing times; make it again with tiermoe trace")
    layers = len(header.experts)
    expert = header.times.expert[min(header.times.expert, key=lambda known: (abs(known - bits), known))]
    found = []
    for layer in range(layers - 1):
        t_window = header.times.dense / layers + header.top_k[layer] * expert
        t_io = latency + expert_bytes(header, layer + 1, bits) / bandwidth
        found.append(math.floor(t_window / t_io))
    return [*found, 0]


def bytes_moved(bits: int) -> Statistic:
    """Bytes of an expert of the first layer at 16 bits over those in `bits`."""

    def count(trace: Trace) -> float:
        from tiermoe.lab.simulate.costs import expert_bytes

        return expert_bytes(trace.header, 0, 16) / expert_bytes(trace.header, 0, bits)

    return count
