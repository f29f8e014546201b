"""Bytes of loads where an expert comes as W1 and its active neurons (CORM)."""

from __future__ import annotations

import random

from tiermoe.decide.composition import Composition
from tiermoe.decide.neurons import NeuronCache, to_load, whole
from tiermoe.simulate.costs import Costs
from tiermoe.trace.schema import Trace
from tiermoe.types import ExpertKey

RECALL = 0.85
"""Of the active neurons, the share that are among the predicted ones: CORM, section 4, has 80 to 90 %. A trace records
what was active, not what an earlier layer would have named."""


class NeuronLoads:
    """What a load moves, and what is fetched when a cached expert lacks active neurons.

    What the running layer loads brings its active neurons. What is read ahead brings as many, of which `RECALL` are
    active ones; the rest is fetched when the expert runs, or left out then (on_mispredict=proceed). Of an expert that
    was predicted and not chosen none are recorded: it counts as bringing the trace's mean share of them. Above the
    share `upper_limit`, and in a pass over several tokens, a whole expert comes."""

    def __init__(self, trace: Trace, costs: Costs, composition: Composition) -> None:
        header = trace.header
        self._costs = costs
        self._limit = composition.upper_limit
        self._proceeds = composition.on_mispredict == "proceed"
        self._layer = -1
        self._pass = 0
        self._predicted: set[ExpertKey] = set()
        self._neurons = header.neurons
        self._head_share = header.head_bytes / (header.head_bytes + header.neurons * header.neuron_bytes)
        self._mean = whole(round(_mean_active(trace)))
        self._active: list[dict[int, int]] | None = None
        self._cache = NeuronCache()

    def begin(self, active: list[dict[int, int]], tokens: int) -> None:
        """A pass over `tokens` tokens begins whose layers' active neurons are `active` (per layer: expert → bit set),
        of one token."""
        self._active = active if tokens == 1 else None
        self._layer = -1
        self._pass += 1

    def at(self, layer: int) -> None:
        """Layer `layer` runs: what is loaded for another is read ahead."""
        self._layer = layer

    def load(self, key: ExpertKey) -> int:
        """Bytes that move when `key` is loaded: W1 and the neurons wanted now."""
        wanted = self._wanted(key, self._mean)
        self._predicted.discard(key)
        if self._active is not None and key.layer != self._layer:
            self._predicted.add(key)
            wanted = as_predicted(wanted, self._neurons, f"{self._pass} {key}")
        neurons = to_load(wanted, self._neurons, self._limit)
        self._cache.put(key, neurons)
        return self._bytes(key, self._head_share, neurons)

    def complete(self, key: ExpertKey) -> int:
        """Bytes to fetch before a cached `key` can be computed with: active neurons that are not here. They stay. None
        where a prediction brought it and the layer goes on with that."""
        predicted = key in self._predicted
        self._predicted.discard(key)
        if predicted and self._proceeds and self._active is not None:
            return 0
        neurons = to_load(self._cache.missing(key, self._wanted(key, 0)), self._neurons, self._limit)
        self._cache.add(key, neurons)
        return self._bytes(key, 0.0, neurons)

    def _wanted(self, key: ExpertKey, unknown: int) -> int:
        if self._active is None:
            return whole(self._neurons)
        return self._active[key.layer].get(key.expert, unknown)

    def _bytes(self, key: ExpertKey, head_share: float, neurons: int) -> int:
        share = head_share + (1 - self._head_share) * neurons.bit_count() / self._neurons
        return round(self._costs.nbytes(key) * share)


def as_predicted(active: int, neurons: int, seed: str) -> int:
    """As many of an expert's `neurons` as are active, `RECALL` of them among these; the same for the same seed."""
    chance = random.Random(seed)
    there = [neuron for neuron in range(neurons) if active >> neuron & 1]
    others = [neuron for neuron in range(neurons) if not active >> neuron & 1]
    wrong = len(there) - round(RECALL * len(there))
    kept = chance.sample(there, len(there) - wrong)
    return sum(1 << neuron for neuron in (*kept, *chance.sample(others, min(wrong, len(others)))))


def _mean_active(trace: Trace) -> float:
    layers = (layer for passed in trace.passes for layer in passed.layers)
    counts = [neurons.bit_count() for layer in layers for neurons in layer.neurons.values()]
    return sum(counts) / len(counts) if counts else 0.0
