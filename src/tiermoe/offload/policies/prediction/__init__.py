"""Predictors: which experts the next layers will choose. `PREDICTIONS` is the one table of their names."""

from tiermoe.offload.policies.prediction.base import (
    Available,
    Forecasts,
    Future,
    HashTable,
    LooksAhead,
    Paths,
    PredictionContext,
    Predictor,
    Ranked,
)
from tiermoe.offload.policies.prediction.baselines import MostFrequent, Nothing, Oracle, WholeLayer
from tiermoe.offload.policies.prediction.gates import NextGate, Recalled, RecalledAndNextGate, StackedGates
from tiermoe.offload.policies.prediction.matrix import ActivationMatrix
from tiermoe.offload.policies.prediction.path import (
    ActivationPath,
    HashRouted,
    HashThenPath,
    count_paths,
    paths_from_json,
    paths_to_json,
)
from tiermoe.offload.policies.prediction.percentile import AbovePercentile
from tiermoe.offload.policies.registry import Registry, subclass_of

__all__ = [
    "PREDICTIONS",
    "Available",
    "Forecasts",
    "Future",
    "HashTable",
    "LooksAhead",
    "Paths",
    "PredictionContext",
    "Predictor",
    "Ranked",
    "count_paths",
    "paths_from_json",
    "paths_to_json",
]

PREDICTIONS = Registry[type[Predictor]]("PREDICTIONS", subclass_of(Predictor), {
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
    "activation-matrix": ActivationMatrix,
    "oracle": Oracle,
})  # fmt: skip
