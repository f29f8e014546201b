"""How right each predictor is, per layer and distance: what it has counted on one trace, judged on another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from tiermoe.lab.simulate.steps import RecordedForecasts, Step
from tiermoe.lab.systems.routings import baseline_uniform, decode_passes, frequencies, recall, routings
from tiermoe.lab.trace.file import Header, Pass, Trace
from tiermoe.offload.policies.prediction import PredictionContext, Predictor, count_paths
from tiermoe.offload.policies.prediction.baselines import MostFrequent
from tiermoe.offload.policies.prediction.gates import NextGate, Recalled
from tiermoe.offload.policies.prediction.path import ActivationPath
from tiermoe.offload.policies.prediction.percentile import AbovePercentile


@dataclass(frozen=True, slots=True)
class RecallRow:
    """One predictor at one layer."""

    predictor: str
    layer: int
    distance: int  # layers before, at which the predictor named experts
    recall: float  # mean share of a decoded token's experts that were among those named
    named: float  # experts, mean
    uniform: float  # the recall of naming K at random: K/E
    frequent: float  # the recall of always naming the K most frequent of the calibration
    tokens: int  # that the means are over


def recall_table(calibration: Trace, held_out: Trace, only: str | None = None) -> list[RecallRow]:
    """Every predictor that the traces hold what it needs for: next-gate, percentile (Fate's 75th), path 1 and 2 (their
    K likeliest), recalled (MoBiLE's little pass at the same position, which knows every layer beforehand: distance 1),
    frequent. Only decoded tokens count. only: the one predictor that is wanted."""
    header = held_out.header
    context = PredictionContext(
        len(header.experts),
        header.experts,
        header.top_k,
        frequencies={(layer, e): n for layer, row in enumerate(frequencies(calibration)) for e, n in enumerate(row)},
        encoder_layers=header.encoder_layers,
    )
    passes = decode_passes(held_out)
    wanted = (only, "frequent")  # the most frequent are every row's baseline
    predictors = _predictors(calibration, held_out, context)
    found = {
        name: _recalls(name, predictor, passes, header)
        for name, predictor in predictors
        if only is None or name in wanted
    }
    frequent = {layer: fmean(values) for (layer, distance), (values, _) in found["frequent"].items() if distance == 1}
    return [
        RecallRow(
            name, layer, distance, fmean(recalls), fmean(named),
            baseline_uniform(header.top_k[layer], header.experts[layer]), frequent[layer], len(recalls),
        )
        for name, cells in found.items()
        if only in (None, name)
        for (layer, distance), (recalls, named) in sorted(cells.items())
    ]  # fmt: skip


Cells = dict[tuple[int, int], tuple[list[float], list[int]]]
"""(layer, distance) → the recall of each token, how many experts were named."""


def _predictors(calibration: Trace, held_out: Trace, context: PredictionContext) -> Iterator[tuple[str, Predictor]]:
    header = held_out.header
    yield "frequent", MostFrequent(context)
    for order in (1, 2):
        paths = count_paths(routings(calibration), order)
        if paths:
            yield f"path {order}", ActivationPath(replace(context, paths=paths), path=order)
    if "forecasts" in header.holds:
        yield "next-gate", NextGate(context, ahead=max(header.forecast_distances))
        yield "percentile", AbovePercentile(context)
    if "little" in header.holds:
        yield "recalled", Recalled(context)


def _recalls(name: str, prediction: Predictor, passes: Sequence[Pass], header: Header) -> Cells:
    most = header.top_k if name.startswith("path") else header.experts  # a path ranks all that it has seen
    cells: Cells = defaultdict(lambda: ([], []))
    for passed in passes:
        recalled = passed.little.layers if passed.little and name == "recalled" else None
        step = Step(passed.phase, passed.sequence, passed.size, passed.tokens, passed.layers, recalled)
        forecasts = RecordedForecasts(step)
        for layer, traced in enumerate(passed.layers):
            if not traced.experts:
                continue
            forecasts.layer = layer
            prediction.observe(step.routed(layer))
            named: dict[int, list[int]] = defaultdict(list)
            for wanted in prediction.candidates(layer, forecasts, lambda target, expert: False):
                named[wanted.layer].append(wanted.expert)
            for target, experts in named.items():
                chosen = passed.layers[target].experts[0]
                if chosen:
                    recalls, counts = cells[target, target - layer]
                    recalls.append(recall(experts[: most[target]], chosen))
                    counts.append(min(len(experts), most[target]))
    return cells
