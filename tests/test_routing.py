"""MoBiLE's little pass, and what recall means."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiermoe.engine.forward_context import keep_little
from tiermoe.errors import ConfigError
from tiermoe.lab.papers.statistics import recall
from tiermoe.offload.policies.routing import as_predicted, is_confident, little, require_little, speedup


@pytest.mark.parametrize(
    ("weights", "positions"),
    [
        ([0.125, 0.5, 0.125, 0.25], [1, 3]),
        ([0.25, 0.5, 0.25], [0, 1]),  # half is rounded up, of equals the earlier
        ([0.0, 0.0], [0]),
        ([1.0], [0]),
        ([], []),
    ],
)
def test_little_by_hand(weights: list[float], positions: list[int]) -> None:
    assert little(weights) == positions


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=8), st.none() | st.integers(1, 9))
def test_little_against_its_definition(weights: list[float], count: int | None) -> None:
    kept = little(weights, count)
    assert len(kept) == ((len(weights) + 1) // 2 if count is None else min(count, len(weights)))
    assert kept == sorted(kept), "the order given"
    left = [gate for position, gate in enumerate(weights) if position not in kept]
    assert min(weights[position] for position in kept) >= max(left, default=0)


def test_as_many_predicted_experts_as_a_token_uses_stand_in() -> None:
    assert as_predicted([3, 1], [5, 3, 1]) == [3, 1]
    assert as_predicted([3, 1], [5, 6, 1]) == [1, 5]
    assert as_predicted([3, 1], [5, 6, 7]) == [5, 6]
    assert as_predicted([3, 1], [5]) == [5, 3]
    assert as_predicted([3, 1], [1]) == [1, 3]
    assert as_predicted([3, 1], []) == [3, 1]


def test_a_little_pass_leaves_some_expert_out() -> None:
    require_little("half", None, [2, 4])
    require_little("half", 3, [2, 4])  # of a layer with fewer, all
    with pytest.raises(ConfigError, match="little=4 leaves no expert out: this model uses 4"):
        require_little("half", 4, [2, 4])


@given(
    st.lists(st.lists(st.floats(0.01, 1), min_size=3, max_size=3), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([None, 1, 2]),
    st.data(),
)
def test_the_engine_drops_what_is_not_little(
    rows: list[list[float]], renormalise: bool, count: int | None, data: st.DataObject
) -> None:
    """Rows that are unsure keep all; what is left of the others has their sum where the model renormalises."""
    unsure = data.draw(st.lists(st.integers(0, len(rows) - 1), unique=True))
    weights = torch.tensor(rows, dtype=torch.float64)
    index, kept = keep_little(torch.arange(3).expand(len(rows), 3), weights, unsure, 9, renormalise, count)
    for number, row in enumerate(rows):
        places = range(3) if number in unsure else little(row, count)
        assert index[number].tolist() == [place if place in places else 9 for place in range(3)]
        gates = kept[number].tolist()
        assert [gates[place] for place in range(3) if place not in places] == [0.0] * (3 - len(places))
        assert sum(gates) == pytest.approx(sum(row) if renormalise else sum(row[place] for place in places))


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
