"""What comes next. `PREDICTIONS` is the one table of names."""

from tiermoe.policy.prediction.base import LooksAhead, Predictor
from tiermoe.policy.prediction.context import PredictionContext
from tiermoe.policy.prediction.gates import NextGate, StackedGates
from tiermoe.policy.prediction.known import HashRouted, MostFrequent, Nothing, Oracle, WholeLayer
from tiermoe.policy.prediction.path import ActivationPath
from tiermoe.policy.prediction.paths import Paths, count_paths, paths_from_json, paths_to_json
from tiermoe.policy.prediction.percentile import AbovePercentile
from tiermoe.policy.prediction.protocol import Forecasts, Here, Ranked
from tiermoe.policy.prediction.recalled import Recalled

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
    "neurons": NextGate,  # CORM's first level; its second, which neurons, belongs to the unit
    "layer": WholeLayer,
    "hash": HashRouted,
    "oracle": Oracle,
}
