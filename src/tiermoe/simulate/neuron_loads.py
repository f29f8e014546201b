"""Bytes of loads where an expert comes as W1 and its active neurons (CORM)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tiermoe.decide.composition import Composition
from tiermoe.decide.neurons import NeuronCache, Records, to_load, whole
from tiermoe.simulate.costs import Costs
from tiermoe.trace.schema import LayerTrace, Trace
from tiermoe.types import ExpertKey

RECALL = 0.85
"""Of the active neurons, the share that are among the predicted ones where a trace does not say what the layer before
would have named: CORM, section 4, has 80 to 90 %."""

_PAGE = 4096  # bytes that a drive reads at least


class NeuronLoads:
    """What a load moves, and what is fetched when a cached expert lacks active neurons.

    What the running layer loads brings its active neurons. What is read ahead brings those that the layer before named,
    in a trace without them as many as are active, `RECALL` of them among these; what lacks is fetched when the expert
    runs, or left out then (on_mispredict=proceed). Of an expert that was predicted and not chosen none are recorded: it
    counts as bringing the trace's mean share of them. Above the share `upper_limit`, and in a pass over several tokens,
    a whole expert comes. A drive reads whole pages, and through gaps (`Composition.gap_bytes`); from main memory single
    neurons are copied."""

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
        self._named: list[dict[int, int]] = []
        self._cache = NeuronCache()
        end = header.head_bytes + header.neurons * header.neuron_bytes
        self._records = Records(header.head_bytes, header.neuron_bytes, header.neurons, end)
        copied = costs.copies or composition.store == "memory"
        self._page, self._gap = (1, 0) if copied else (_PAGE, composition.gap_bytes)

    def begin(self, layers: Sequence[LayerTrace], tokens: int) -> None:
        """A pass over `tokens` tokens begins; neurons are known where it is one."""
        self._active = [layer.neurons for layer in layers] if tokens == 1 else None
        self._named = [layer.named for layer in layers]
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
            named = self._named[key.layer].get(key.expert)
            wanted = as_predicted(wanted, self._neurons, f"{self._pass} {key}") if named is None else named
        brought, share = self._read(to_load(wanted, self._neurons, self._limit))
        self._cache.put(key, brought)
        return round(self._costs.nbytes(key) * (self._head_share + share))

    def complete(self, key: ExpertKey) -> int:
        """Bytes to fetch before a cached `key` can be computed with: active neurons that are not here. They stay. None
        where a prediction brought it and the layer goes on with that."""
        predicted = key in self._predicted
        self._predicted.discard(key)
        if predicted and self._proceeds and self._active is not None:
            return 0
        missing = self._cache.missing(key, self._wanted(key, 0))
        brought, share = self._read(to_load(missing, self._neurons, self._limit))
        self._cache.add(key, brought)
        return round(self._costs.nbytes(key) * share)

    def _wanted(self, key: ExpertKey, unknown: int) -> int:
        if self._active is None:
            return whole(self._neurons)
        return self._active[key.layer].get(key.expert, unknown)

    def _read(self, wanted: int) -> tuple[int, float]:
        """The neurons that reading `wanted` brings, and the share of the expert that is read for them."""
        brought = nbytes = 0
        for start, stop in self._records.spans(wanted, self._page, self._gap):
            brought |= self._records.within(start, stop)
            nbytes += stop - start
        return brought, nbytes / self._records.end


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
