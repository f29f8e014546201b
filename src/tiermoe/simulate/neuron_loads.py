"""Bytes of loads where an expert comes as W1 and its active neurons (CORM)."""

from __future__ import annotations

from tiermoe.decide.neurons import NeuronCache, to_load, whole
from tiermoe.simulate.costs import Costs
from tiermoe.trace.schema import Trace
from tiermoe.types import ExpertKey


class NeuronLoads:
    """What a load moves, and what is fetched when a cached expert lacks active neurons.

    The neurons recorded for a layer stand for the predicted ones. Of an expert that was predicted and not chosen none
    are recorded: it counts as bringing the trace's mean share of them. Above the share `upper_limit`, and in a pass
    over several tokens, a whole expert comes."""

    def __init__(self, trace: Trace, costs: Costs, upper_limit: float) -> None:
        header = trace.header
        self._costs = costs
        self._limit = upper_limit
        self._neurons = header.neurons
        self._head_share = header.head_bytes / (header.head_bytes + header.neurons * header.neuron_bytes)
        self._mean = whole(round(_mean_active(trace)))
        self._active: list[dict[int, int]] | None = None
        self._cache = NeuronCache()

    def begin(self, active: list[dict[int, int]], tokens: int) -> None:
        """A pass over `tokens` tokens begins whose layers' active neurons are `active` (per layer: expert → bit set),
        of one token."""
        self._active = active if tokens == 1 else None

    def load(self, key: ExpertKey) -> int:
        """Bytes that move when `key` is loaded: W1 and the neurons wanted now."""
        neurons = to_load(self._wanted(key, self._mean), self._neurons, self._limit)
        self._cache.put(key, neurons)
        return self._bytes(key, self._head_share, neurons)

    def complete(self, key: ExpertKey) -> int:
        """Bytes to fetch before a cached `key` can be computed with: active neurons that are not here. They stay."""
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


def _mean_active(trace: Trace) -> float:
    layers = (layer for passed in trace.passes for layer in passed.layers)
    counts = [neurons.bit_count() for layer in layers for neurons in layer.neurons.values()]
    return sum(counts) / len(counts) if counts else 0.0
