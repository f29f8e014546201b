"""What comes next. `PREDICTIONS` is the one table of names."""

from collections.abc import Callable

from tiermoe.policy.prediction.context import PredictionContext
from tiermoe.policy.prediction.gates import NextGate, StackedGates
from tiermoe.policy.prediction.known import HashRouted, MostFrequent, Nothing, Oracle, WholeLayer
from tiermoe.policy.prediction.path import ActivationPath
from tiermoe.policy.prediction.paths import Paths, count_paths, paths_from_json, paths_to_json
from tiermoe.policy.prediction.percentile import AbovePercentile
from tiermoe.policy.prediction.protocol import Forecasts, Here, Prediction, Ranked
from tiermoe.policy.prediction.recalled import Recalled

__all__ = [
    "PREDICTIONS",
    "Forecasts",
    "Here",
    "Paths",
    "Prediction",
    "PredictionContext",
    "Ranked",
    "asks_routers",
    "count_paths",
    "paths_from_json",
    "paths_to_json",
]

PREDICTIONS: dict[str, Callable[[PredictionContext], Prediction]] = {
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


def asks_routers(name: str) -> bool:
    """Whether the prediction of this name asks the model's routers."""
    return bool(getattr(PREDICTIONS[name], "asks_routers", False))
