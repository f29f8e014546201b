"""The neuron cache's rules, by worked examples and against plain loops."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tiermoe.offload.policies.neurons import NeuronCache, runs, to_load, whole
from tiermoe.types import ExpertKey

KEY = ExpertKey(1, 2, 4)


def bits(*neurons: int) -> int:
    return sum(1 << neuron for neuron in neurons)


def test_a_cached_expert_keeps_the_union() -> None:
    cache = NeuronCache()
    cache.put(KEY, bits(0, 2, 5))
    assert cache.missing(KEY, bits(0, 2)) == 0
    assert cache.missing(KEY, bits(1, 2, 6)) == bits(1, 6)
    cache.add(KEY, bits(1, 6))
    assert cache.missing(KEY, whole(8)) == bits(3, 4, 7)


def test_a_newly_cached_expert_starts_with_what_was_loaded() -> None:
    cache = NeuronCache()
    cache.put(KEY, whole(8))
    cache.put(ExpertKey(1, 3, 4), bits(7))
    cache.put(KEY, bits(1))  # it had left and came again
    assert cache.missing(KEY, bits(0, 1)) == bits(0)
    assert cache.missing(ExpertKey(1, 3, 4), bits(6, 7)) == bits(6)


def test_all_neurons_are_loaded_above_the_upper_limit() -> None:
    six, seven = whole(6), whole(7)
    assert to_load(six, 8, 0.75) == six  # 6 of 8 are 75 %: not above
    assert to_load(seven, 8, 0.75) == whole(8)
    assert to_load(bits(3), 8, 0.0) == whole(8)
    assert to_load(0, 8, 0.0) == 0
    assert to_load(whole(8), 8, 1.0) == whole(8)


def test_runs_are_coalesced_over_small_gaps() -> None:
    neurons = bits(1, 2, 3, 6, 10, 11)
    assert runs(neurons) == [(1, 3), (6, 1), (10, 2)]
    assert runs(neurons, gap=2) == [(1, 6), (10, 2)]
    assert runs(neurons, gap=3) == [(1, 11)]
    assert runs(0, gap=9) == []


@given(st.sets(st.integers(0, 80)), st.integers(0, 10))
def test_runs_cover_the_set_and_no_gap_longer_than_allowed(neurons: set[int], gap: int) -> None:
    found = runs(bits(*neurons), gap)
    covered = [neuron for first, count in found for neuron in range(first, first + count)]
    assert covered == sorted(set(covered))
    assert neurons <= set(covered)
    assert {neuron for first, count in found for neuron in (first, first + count - 1)} <= neurons
    between = [second - first - count for (first, count), (second, _) in pairwise(found)]
    assert all(absent > gap for absent in between)
    for neuron in set(covered) - neurons:  # what is read through lies in a gap of `gap` at most
        below = max(other for other in neurons if other < neuron)
        above = min(other for other in neurons if other > neuron)
        assert above - below - 1 <= gap


@given(st.lists(st.integers(0, 255), max_size=12))
def test_the_cache_against_sets(asked: list[int]) -> None:
    cache = NeuronCache()
    cache.put(KEY, 0)
    there: set[int] = set()
    for active in asked:
        wanted = {neuron for neuron in range(8) if active >> neuron & 1}
        missing = cache.missing(KEY, active)
        assert missing == bits(*(wanted - there))
        loaded = to_load(missing, 8, 0.5)
        cache.add(KEY, loaded)
        there |= set(range(8)) if len(wanted - there) > 4 else wanted
        assert cache.missing(KEY, whole(8)) == bits(*(set(range(8)) - there))
