"""Which bits each expert gets: the papers' rules on examples worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermoe.errors import ConfigError
from tiermoe.offload.policies.precision import PRECISIONS, Precision, PrecisionContext, thresholds, unimportance
from tiermoe.types import Demand, Routed

SCORES = [0.0, 0.0, 0.0, 0.0, 0.0, 0.55, 0.6, 0.7, 0.8, 0.95]


def make(name: str, top_k: Sequence[int] = (3, 3), table: Any = None, **settings: Any) -> Precision:
    return PRECISIONS[name](PrecisionContext(4, top_k, table or {}), **settings)


def one(experts: list[int], weights: list[float], layer: int = 0) -> Routed:
    return Routed(layer, "decode", [experts], [weights])


def test_unimportance_is_the_weight_that_ranks_before() -> None:
    """Weights 0.5, 0.25, 0.25 of a sum of 1: s = 0, 0.5, 0.75, whatever the order and the scale."""
    assert unimportance([0.5, 0.25, 0.25]) == [0, 0.5, 0.75]
    assert unimportance([0.25, 0.5, 0.25]) == [0.5, 0, 0.75], "ties rank as given"
    assert unimportance([2.0, 8.0, 6.0]) == [0.875, 0, 0.5], "normalised over the K"
    assert unimportance([-3.0, 1.0]) == [0, 0.75], "by absolute value"
    assert unimportance([0.0, 0.0]) == [0, 0]
    assert unimportance([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_unimportance_against_its_definition(weights: list[float]) -> None:
    total = sum(weights)
    scores = unimportance(weights)
    assert all(0 <= score <= 1 for score in scores)
    for i, weight in enumerate(weights):
        before = [w for j, w in enumerate(weights) if w > weight or (w == weight and j < i)]
        assert scores[i] == pytest.approx(sum(before) / total if total else 0)


@pytest.mark.parametrize(
    ("scores", "high", "skip", "expected"),
    [
        (SCORES, 0.7, 0.1, (0.6, 0.8)),
        (SCORES, 0.3, 0.2, (0.0, 0.7)),  # half of them are 0 at once
        (SCORES, 0.5, 0.5, (0.0, 0.0)),  # nothing low
        (SCORES, 1.0, 0.0, (1.0, 1.0)),  # no score to come is low or skipped
        ([i / 100 for i in range(1, 101)], 0.55, 0.03, (0.55, 0.97)),  # though 0.55 * 100 is rounded to a little more
        ([0.0, 0.9], 0.5 + 9e-10, 0.5, (0.9, 0.9)),  # rounded shares of one whole
    ],
)
def test_thresholds_are_quantiles(scores: list[float], high: float, skip: float, expected: tuple[float, float]) -> None:
    assert thresholds(scores, high, skip) == expected


@pytest.mark.parametrize(("high", "skip"), [(0.8, 0.3), (-0.1, 0.1), (0.1, -0.1)])
def test_impossible_shares_are_refused(high: float, skip: float) -> None:
    with pytest.raises(ConfigError, match="shares of one whole"):
        thresholds([0.5], high, skip)
    with pytest.raises(ConfigError, match="longer calibration text"):
        thresholds([], 0.5, 0.1)


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=100),
    st.integers(0, 100),
    st.integers(0, 100),
)
def test_thresholds_keep_their_shares(scores: list[float], high: int, skip: int) -> None:
    skip = min(skip, 100 - high)
    t1, t2 = thresholds(scores, high / 100, skip / 100)
    assert t1 <= t2
    for threshold, percent in ((t1, high), (t2, 100 - skip)):
        assert 100 * sum(score <= threshold for score in scores) >= percent * len(scores)
        below = [score for score in scores if score < threshold]
        if percent < 100:
            assert not below or 100 * len(below) < percent * len(scores), "a smaller one would do"


def test_fixed() -> None:
    precision = make("fixed")
    routed = Routed(0, "prefill", [[5, 1], [1, 2]], [[0.9, 0.1], [0.5, 0.5]])
    assert precision.demands(routed) == [Demand(1, 2, 4), Demand(2, 1, 4), Demand(5, 1, 4)]
    assert precision.predicted(0, [(1, 0.01)], 1) == 4


def test_gate_score_high_low_and_skipped() -> None:
    """s = 0, 0.5, 0.75 and, of Mixtral's example, T1 = 0.6 and T2 = 0.9: both at the thresholds count as below."""
    routed = one([6, 2, 4], [0.25, 0.5, 0.25])
    assert make("gate-score", t1=0.6, t2=0.9).demands(routed) == [Demand(2, 1, 4), Demand(4, 1, 2), Demand(6, 1, 4)]
    assert make("gate-score", t1=0.5, t2=0.75).demands(routed) == [Demand(2, 1, 4), Demand(4, 1, 2), Demand(6, 1, 4)]
    assert make("gate-score", t1=0.4, t2=0.6).demands(routed) == [Demand(2, 1, 4), Demand(4, 1, 0), Demand(6, 1, 2)]
    assert make("gate-score", t1=0.0, t2=0.0).demands(routed) == [Demand(2, 1, 4), Demand(4, 1, 0), Demand(6, 1, 0)]


def test_the_highest_demand_of_several_tokens_wins() -> None:
    """Expert 7 is skipped by the first token and low for the second, 1 is high for the first and skipped by the
    third."""
    weights = [[0.8, 0.15, 0.05], [0.5, 0.4, 0.1], [0.85, 0.1, 0.05]]
    routed = Routed(0, "prefill", [[1, 2, 7], [3, 7, 2], [4, 5, 1]], weights)
    # s: 0, .8, .95 | 0, .5, .9 | 0, .85, .95
    precision = make("gate-score", t1=0.4, t2=0.8)
    assert {d.expert: d.bits for d in precision.demands(routed)} == {1: 4, 2: 2, 3: 4, 4: 4, 5: 0, 7: 2}
    assert [d.tokens for d in precision.demands(routed)] == [2, 2, 1, 1, 1, 2]


def test_a_predicted_score_asks_for_its_precision() -> None:
    """The predicted top 3 weigh .4, .2, .2 of a softmax over all: normalised s = 0, .5, .75."""
    precision = make("gate-score", t1=0.4, t2=0.6)
    ranked = [(9, 0.4), (8, 0.2), (7, 0.2), (6, 0.1)]
    assert [precision.predicted(0, ranked, expert) for expert in (9, 8, 7, 6, 5)] == [4, 2, 0, 0, 0]
    assert make("gate-score", t1=0.4, t2=1.0).predicted(0, ranked, 6) == 2, "all of the weight is before it"
    assert make("gate-score", t1=0.4, t2=0.6, top_k=(3, 2)).predicted(1, ranked, 8) == 0, "2 of 3 before it, of two"
    assert precision.predicted(0, [], 8) == 4, "a predictor without weights"


def test_predictions_for_several_tokens_are_high() -> None:
    precision = make("gate-score", t1=0.4, t2=0.6)
    precision.demands(Routed(0, "prefill", [[1, 2, 3]] * 2, [[0.5, 0.3, 0.2]] * 2))
    assert precision.predicted(1, [(9, 0.8), (8, 0.6), (7, 0.6)], 7) == 4
    precision.demands(one([1, 2, 3], [0.5, 0.3, 0.2]))
    assert precision.predicted(1, [(9, 0.8), (8, 0.6), (7, 0.6)], 7) == 0


TOKENS = Routed(0, "prefill", [[0, 1], [0, 2], [0, 2], [3, 4]], [[0.5, 0.5]] * 4)
"""Of experts 0 to 4: 3, 1, 2, 1, 1."""


def bits_of(precision: Any, routed: Routed) -> dict[int, int]:
    return {demand.expert: demand.bits for demand in precision.demands(routed)}


def test_popularity_lowers_the_least_popular_in_prefill() -> None:
    """Forty percent of five are two: of the three with one token the higher indices."""
    assert bits_of(make("popularity", low_popularity=0.4), TOKENS) == {0: 4, 1: 4, 2: 4, 3: 2, 4: 2}
    nearly = bits_of(make("popularity", low_popularity=0.39), TOKENS)
    assert [expert for expert, bits in nearly.items() if bits == 2] == [4], "rounded down"
    assert set(bits_of(make("popularity", low_popularity=0.0), TOKENS).values()) == {4}


def test_predicted_popularity_binds_what_its_layer_demands() -> None:
    """A copy that was read ahead is the one that is asked for, and what nobody expected is least popular."""
    precision = make("popularity", low_popularity=0.4)
    precision.demands(TOKENS)
    ranked = [(4, 9), (2, 7), (0, 2), (1, 1), (6, 1)]
    foreseen = [precision.predicted(1, ranked, expert) for expert in range(7)]
    assert foreseen == [4, 2, 4, 2, 4, 2, 2]
    found = bits_of(precision, TOKENS._replace(layer=1))
    assert found == {expert: foreseen[expert] for expert in range(5)}
    assert bits_of(precision, TOKENS._replace(layer=2))[1] == 4, "by its own tokens: nothing was predicted for it"
    precision.predicted(2, ranked, 0)
    precision.demands(TOKENS._replace(layer=0))
    assert bits_of(precision, TOKENS._replace(layer=2))[1] == 4, "what an interrupted pass predicted is forgotten"
    assert precision.predicted(1, (), 3) == 4, "nothing is known"
    none = make("popularity", low_popularity=0.0)
    none.demands(TOKENS)
    assert none.predicted(1, ranked, 3) == 4
    assert set(bits_of(none, TOKENS._replace(layer=1)).values()) == {4}, "nothing is low, nor what was not predicted"


def test_what_was_not_predicted_is_low_on_small_machines() -> None:
    """A low demand: a high copy that a prediction brought serves it, a miss is loaded low."""
    precision = make("popularity", low_popularity=0.0, mispredicted="low")
    assert [demand.bits for demand in precision.demands(Routed(0, "decode", [[1, 2]], [[]]))] == [2, 2]
    assert precision.predicted(1, [(5, 0.9), (6, 0.1)], 5) == 4
    assert [demand.bits for demand in precision.demands(Routed(0, "prefill", [[1, 2]], [[]]))] == [4, 4]


def test_popularity_is_high_in_decode() -> None:
    precision = make("popularity", low_popularity=1.0)
    assert {d.bits for d in precision.demands(Routed(0, "prefill", [[0, 1]], [[0.5, 0.5]]))} == {2}
    assert {d.bits for d in precision.demands(one([0, 1], [0.5, 0.5]))} == {4}
    assert precision.predicted(1, [(0, 0.5), (1, 0.5)], 1) == 4


def test_a_share_of_one_hundred_experts() -> None:
    """29 % of a hundred are 29, though 0.29 * 100 is rounded to a little less."""
    precision = make("popularity", low_popularity=0.29)
    demands = precision.demands(Routed(0, "prefill", [[e] for e in range(100)], [[1.0]] * 100))
    assert [d.expert for d in demands if d.bits == 2] == list(range(71, 100))


def test_table() -> None:
    precision = make("table", table={(1, 0): 2, (1, 1): 8, (0, 2): 2})
    assert precision.demands(one([1, 0, 2], [0.4, 0.3, 0.3], layer=1)) == [
        Demand(0, 1, 2),
        Demand(1, 1, 8),
        Demand(2, 1, 4),
    ]
    assert [precision.predicted(layer, [], 2) for layer in (0, 1)] == [2, 4]


@pytest.mark.parametrize(
    ("name", "settings"),
    [("gate-score", {"t1": 0.5}), ("gate-score", {"t2": 0.5}), ("popularity", {}), ("table", {})],
)
def test_what_it_is_made_from_is_required(name: str, settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"precision={name} needs .*tiermoe calibrate"):
        make(name, **settings)
