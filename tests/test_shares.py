"""Slots that move to the layers whose experts are used most."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caches import lru_of
from tiermoe.decide.allotment import by_use
from tiermoe.decide.pools import Pools
from tiermoe.decide.shares import most_used
from tiermoe.types import Demand, ExpertKey

ROWS = st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=3, max_size=3)


def held(sizes: Sequence[int], uses: Sequence[Sequence[float]]) -> float:
    """Uses of the experts that lie in so many slots a layer, at best."""
    return sum(sum(sorted(row, reverse=True)[:size]) for size, row in zip(sizes, uses, strict=True))


@given(ROWS, st.integers(1, 2), st.integers(0, 12))
def test_no_other_shares_hold_more_uses(uses: list[list[float]], minimum: int, more: int) -> None:
    slots = min(12, 3 * minimum + more)
    found = most_used(slots, uses, minimum)
    assert sum(found) == slots
    assert all(minimum <= size <= 4 for size in found)
    every = (sizes for sizes in product(range(minimum, 5), repeat=3) if sum(sizes) == slots)
    assert held(found, uses) == max(held(sizes, uses) for sizes in every)


def test_what_is_left_goes_round_the_layers() -> None:
    assert most_used(9, [[0.0] * 4] * 3, 1) == [3, 3, 3]
    assert most_used(7, [[0.0] * 2, [0.0] * 8], 1) == [2, 5]
    assert most_used(20, [[1.0] * 4] * 3, 1) == [4, 4, 4]


def test_free_slots_move_at_once_and_others_when_a_layer_misses() -> None:
    cache = Pools(by_use(6, 2), lru_of, (4,))
    for expert in range(2):
        assert cache.reserve(ExpertKey(0, expert, 4)) is not None
        cache.arrived(ExpertKey(0, expert, 4))
    cache.follow([[9, 0, 0, 0], [5, 5, 5, 5]])
    assert [cache.free(0), cache.free(1)] == [0, 4]  # 2 and 4: nobody left
    cache.follow([[9, 9, 9, 9], [1, 0, 0, 0]])
    assert [cache.free(0), cache.free(1)] == [2, 2]  # 4 and 2


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7), st.booleans()), min_size=30, max_size=120),
    st.integers(6, 14),
)
def test_slots_are_neither_lost_nor_shared(asked: list[tuple[int, int, bool]], slots: int) -> None:
    """Whatever is asked for, protected and pinned meanwhile; a layer can always have its minimum."""
    cache = Pools(by_use(slots, 3, 2), lru_of, (4,))
    uses = [[0] * 8 for _ in range(3)]
    pinned: list[ExpertKey] = []
    for layer, expert, protects in asked:
        key = ExpertKey(layer, expert, 4)
        uses[layer][expert] += 1
        if cache.find(*key) is None:
            assert cache.reserve(key) is not None
            cache.arrived(key)
        cache.used(key, Demand(expert, 1, 4))
        if protects:
            cache.protect(key)
        pinned.append(key)
        cache.pin(key)
        if len(pinned) > 1:
            cache.unpin(pinned.pop(0))
        cache.follow(uses)
        there = [cache.slot(ExpertKey(row, column, 4)) for row in range(3) for column in range(8)]
        taken = [slot for slot in there if slot is not None]
        assert len(taken) == len(set(taken)) == len(cache)
        assert len(cache) + sum(cache.free(number) for number in range(3)) == slots
        assert set(taken) <= set(range(slots))


def test_a_layer_that_keeps_to_few_experts_leaves_its_slots_to_the_others() -> None:
    """Layer 0 uses two experts, layer 1 goes round seven: with four slots each it never hits, with six and two almost
    always."""
    cache, hits = Pools(by_use(9, 2, 1), lru_of, (4,)), 0
    uses = [[0] * 8 for _ in range(2)]
    for token in range(100):
        for key in (ExpertKey(0, token % 2, 4), ExpertKey(1, token % 7, 4)):
            uses[key.layer][key.expert] += 1
            if cache.find(*key) is None:
                assert cache.reserve(key) is not None
                cache.arrived(key)
            else:
                hits += 1
            cache.used(key, Demand(key.expert, 1, 4))
        if token % 16 == 15:
            cache.follow(uses)
    assert hits > 160


@pytest.mark.parametrize("minimum", [1, 3])
def test_a_layer_keeps_its_minimum(minimum: int) -> None:
    assert most_used(8, [[9.0] * 4, [0.0] * 4], minimum) == [4, 4]
    assert most_used(6, [[9.0] * 8, [0.0] * 8], minimum) == [6 - minimum, minimum]
