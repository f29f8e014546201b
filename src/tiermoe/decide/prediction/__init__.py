"""What comes next. `PREDICTIONS` is the one table of names."""

from tiermoe.decide.prediction.gates import NextGate, StackedGates
from tiermoe.decide.prediction.known import HashRouted, MostFrequent, Nothing, Oracle, WholeLayer
from tiermoe.decide.prediction.path import ActivationPath, HashThenPath
from tiermoe.decide.prediction.paths import Paths, count_paths, paths_from_json, paths_to_json
from tiermoe.decide.prediction.percentile import AbovePercentile
from tiermoe.decide.prediction.protocol import Forecasts, Here, LooksAhead, PredictionContext, Predictor, Ranked
from tiermoe.decide.prediction.recalled import Recalled, RecalledAndNextGate

__all__ = [
    "PREDICTIONS",
    "Forecasts",
    "Here",
    "LooksAhead",
    "Paths",
    "PredictionContext",
    "Predictor",
    "Ranked",
    "count_paths",
    "paths_from_json",
    "paths_to_json",
]

PREDICTIONS: dict[str, type[Predictor]] = {
    "none": Nothing,
    "next-gate": NextGate,
    "stacked-gates": StackedGates,
    "percentile": AbovePercentile,
    "path": ActivationPath,
    "frequent": MostFrequent,
    "recalled": Recalled,
    "recalled+next-gate": RecalledAndNextGate,
    "neurons": NextGate,  # CORM's first level; its second, which neurons, belongs to the unit
    "layer": WholeLayer,
    "hash": HashRouted,
    "hash+path": HashThenPath,
    "oracle": Oracle,
}
