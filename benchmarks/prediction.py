"""How right each predictor is, per layer and distance, on a text disjoint from the one it was calibrated on.

    tiermoe trace MODEL --text calibration.txt --out a.trace
    tiermoe trace MODEL --text held-out.txt --out b.trace
    python -m benchmarks.prediction a.trace b.trace

Prints a markdown table: of a decoded token's K experts the share that was named, beside K/E and beside always naming
the layer's K most frequent. `named`: how many experts were named.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from tiermoe.offload.policies.prediction import PredictionContext, Predictor, count_paths
from tiermoe.offload.policies.prediction.baselines import MostFrequent
from tiermoe.offload.policies.prediction.gates import NextGate, Recalled
from tiermoe.offload.policies.prediction.path import ActivationPath
from tiermoe.offload.policies.prediction.percentile import AbovePercentile
from tiermoe.simulate.steps import RecordedForecasts, Step
from tiermoe.systems.routings import baseline_uniform, decode_passes, frequencies, recall, routings
from tiermoe.trace.file import Header, Pass, Trace, read_trace


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


def recall_table(calibration: Trace, held_out: Trace) -> list[RecallRow]:
    """Every predictor that the traces hold what it needs for: next-gate, percentile (Fate's 75th), path 1 and 2 (their
    K likeliest), recalled (MoBiLE's little pass at the same position, which knows every layer beforehand: distance 1),
    frequent. Only decoded tokens count."""
    header = held_out.header
    context = PredictionContext(
        len(header.experts),
        header.experts,
        header.top_k,
        frequencies={(layer, e): n for layer, row in enumerate(frequencies(calibration)) for e, n in enumerate(row)},
        encoder_layers=header.encoder_layers,
    )
    passes = decode_passes(held_out)
    predictors = _predictors(calibration, held_out, context)
    found = {name: _recalls(name, predictor, passes, header) for name, predictor in predictors}
    frequent = {layer: fmean(values) for (layer, distance), (values, _) in found["frequent"].items() if distance == 1}
    return [
        RecallRow(
            name, layer, distance, fmean(recalls), fmean(named),
            baseline_uniform(header.top_k[layer], header.experts[layer]), frequent[layer], len(recalls),
        )
        for name, cells in found.items()
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


def markdown(rows: list[RecallRow]) -> str:
    """One line per predictor and distance, one column per layer, and the mean over layers."""
    layers = sorted({row.layer for row in rows})
    lines = [
        "| predictor | distance | named | " + " | ".join(f"layer {layer}" for layer in layers) + " | mean |",
        "|---|" + "--:|" * (len(layers) + 3),
    ]
    groups: dict[tuple[str, int], list[RecallRow]] = defaultdict(list)
    for row in rows:
        groups[row.predictor, row.distance].append(row)
    first = {row.layer: row for row in rows}
    lines.append(_line("K/E", "", "", layers, {layer: row.uniform for layer, row in first.items()}))
    for (name, distance), found in groups.items():
        named = sum(row.named for row in found) / len(found)
        lines.append(_line(name, str(distance), f"{named:.1f}", layers, {row.layer: row.recall for row in found}))
    return "\n".join(lines)


def _line(name: str, distance: str, named: str, layers: list[int], values: dict[int, float]) -> str:
    cells = [f"{values[layer]:.3f}" if layer in values else "" for layer in layers]
    return f"| {name} | {distance} | {named} | " + " | ".join(cells) + f" | {sum(values.values()) / len(values):.3f} |"


def main() -> None:
    top = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description=__doc__)
    top.formatter_class = argparse.RawDescriptionHelpFormatter
    top.add_argument("calibration", type=Path)
    top.add_argument("held_out", type=Path)
    args = top.parse_args()
    calibration, held_out = read_trace(args.calibration), read_trace(args.held_out)
    if calibration.header.made_from.get("text_xxh3", 0) == held_out.header.made_from.get("text_xxh3", 1):
        top.error("both traces are of the same text; the held-out one must be of another")
    print(markdown(recall_table(calibration, held_out)))


if __name__ == "__main__":
    main()
