"""MoBiLE's little pass, and what recall means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermoe.policy.recall import baseline_uniform, recall
from tiermoe.policy.routing import half, is_confident, little, speedup


def test_half_is_rounded_up() -> None:
    assert [half(k) for k in (1, 2, 3, 4, 8)] == [1, 1, 2, 2, 4]


def test_little_keeps_the_largest_weights_in_order() -> None:
    experts = [[5, 1, 9, 4], [2, 8, 3, 6], []]
    weights = [[0.125, 0.5, 0.125, 0.25], [0.25, 0.25, 0.25, 0.25], []]
    assert little(experts, weights, renormalise=False) == ([[1, 4], [2, 8], []], [[0.5, 0.25], [0.25, 0.25], []])


def test_little_weights_keep_the_sum_where_the_model_renormalises() -> None:
    _, weights = little([[5, 1, 9]], [[0.25, 0.5, 0.25]], renormalise=True)
    assert weights == [[pytest.approx(1 / 3), pytest.approx(2 / 3)]]
    assert little([[3, 4]], [[0.0, 0.0]], renormalise=True) == ([[3]], [[0.0]])


@given(st.lists(st.lists(st.floats(0.01, 1), min_size=1, max_size=8), max_size=5), st.booleans())
def test_little_against_its_definition(weights: list[list[float]], renormalise: bool) -> None:
    experts = [list(range(10, 10 + len(row))) for row in weights]
    kept_experts, kept_weights = little(experts, weights, renormalise)
    for row, chosen, gates in zip(weights, kept_experts, kept_weights, strict=True):
        assert len(chosen) == (len(row) + 1) // 2
        assert chosen == sorted(chosen), "the order given"
        left = [gate for index, gate in enumerate(row) if index + 10 not in chosen]
        assert min(row[e - 10] for e in chosen) >= max(left, default=0)
        if renormalise:
            assert sum(gates) == pytest.approx(sum(row))
        else:
            assert gates == [row[e - 10] for e in chosen]


def test_confident_is_strictly_above_gamma() -> None:
    assert is_confident(0.71, 0.7)
    assert not is_confident(0.7, 0.7)


def test_speedup_by_hand() -> None:
    """Little 0.5 s, big 0.6 s, one in five falls back, 1 s with all K: 1 / (0.5 + 0.12)."""
    assert speedup(0.5, 0.6, 0.2, 1.0) == pytest.approx(1 / 0.62)
    assert speedup(1.0, 1.2, 0.2, 2.0) == pytest.approx(1 / 0.62), "a ratio of times"


def test_recall() -> None:
    assert recall([5, 11, 21, 36], [5, 21, 31, 36]) == 0.75, "Fate, section 4.2"
    assert recall([5, 11, 21, 36, 31], [5, 21, 31, 36]) == 1
    assert recall([], [1]) == 0
    with pytest.raises(ValueError, match="chosen"):
        recall([1], [])


def test_the_baseline_is_random_naming() -> None:
    assert baseline_uniform(4, 60) == pytest.approx(1 / 15)
