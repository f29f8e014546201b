"""From a trace to settings, against figures computed by hand."""

from __future__ import annotations

import pytest

from small_traces import decode, layer, prompt, trace_of
from tiermoe.config import CacheSize
from tiermoe.errors import TraceError
from tiermoe.lab.papers import corm, fate, hobbit, statistics
from tiermoe.lab.papers.hobbit import WEIGHTS, MissPenalties
from tiermoe.lab.papers.statistics import halves, recalls, routings
from tiermoe.lab.trace import Little, Pass, Times, Trace, frequencies
from tiermoe.offload.composition import Composition
from tiermoe.offload.policies.prediction import count_paths
from tiermoe.offload.presets import PRESETS

HALF = CacheSize(fraction=0.5)


def test_thresholds_split_the_scores_of_decoded_tokens() -> None:
    """Ten tokens of two experts: ten scores of 0, and the first weights .50, .55, … .95 in another order."""
    firsts = [0.95, 0.5, 0.9, 0.55, 0.85, 0.6, 0.8, 0.65, 0.75, 0.7]
    passes = [decode(layer([0, 1], weights=[[first, 1 - first]])) for first in firsts]
    passes.append(prompt(layer([0, 1], weights=[[0.01, 0.99]])))  # of a prompt: does not count
    found = trace_of(passes, 2)
    t1, t2 = hobbit.thresholds_of(found, high_share=0.75, skip_share=0.1)
    assert t1 == pytest.approx(0.7)  # 15 of 20: the ten zeros and .50 to .70
    assert t2 == pytest.approx(0.85)  # 18 of 20
    split = hobbit.Split.of(found, t1, t2)
    assert (split.high, split.low, split.skipped) == pytest.approx((0.75, 0.15, 0.1))


def _two_pools() -> tuple[Trace, Composition]:
    """Eight experts of 100 and 50 bytes; half of 800 bytes, half for each pool: 2 high and 4 low slots."""
    choices = [[0, 1], [0, 1], [1, 0], [2, 3], [4, 0]]
    passes = [decode(layer(chosen, weights=[[0.6, 0.4]])) for chosen in choices]
    composition = PRESETS["hobbit"].having({"t1": 0.5, "t2": 0.9, "low_share": 0.5})
    return trace_of(passes, 8), composition


def test_miss_penalty_counts_a_low_miss_by_its_bits() -> None:
    found, composition = _two_pools()
    # 0 high and 1 low miss; both hit; 1 misses high, and 0's high copy serves a low demand first; 2 high takes its
    # place (1 was used last), 3 low; 4 high, and 0 low, which no copy serves any more
    penalty = MissPenalties(found, composition, 4, HALF).of("lru")
    assert penalty == 1.5 + 0 + 1 + 1.5 + 1.5


def test_weights_are_the_best_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    found, composition = _two_pools()
    tried = MissPenalties(found, composition, 4, HALF)
    best, grid = tried.search(), WEIGHTS
    assert len(set(grid)) == 35
    assert all(sum(weights) == 1 for weights in grid)
    penalties = [tried.of("weighted", weights) for weights in grid]
    assert best.penalty == min(penalties)
    assert best.weights == grid[penalties.index(min(penalties))]
    assert best.lru_penalty == tried.of("lru")
    assert tried.demands == 10
    monkeypatch.setattr(hobbit, "MOST_DEMANDS", 3)  # a long trace is cut off
    assert MissPenalties(found, composition, 4, HALF).demands == 4


def test_weights_are_judged_on_the_sequences_between() -> None:
    found, composition = _two_pools()
    for number, passed in enumerate(found.passes):
        passed.sequence = number
    even, odd = halves(found)
    assert [passed.sequence for passed in even.passes] == [0, 2, 4]
    assert [passed.sequence for passed in odd.passes] == [1, 3]
    weights = (0.0, 1.0, 0.0, 0.0)
    penalties = MissPenalties(odd, composition, 4, HALF)
    judged = penalties.judge(weights)
    assert judged.penalty == penalties.of("weighted", weights)
    assert judged.over_lru == judged.penalty / penalties.of("lru") - 1
    assert judged.over_lfu == judged.penalty / penalties.of("lfu") - 1
    with pytest.raises(TraceError, match="holds one sequence"):
        halves(Trace(even.header, even.passes[:1]))


def _predicted(right: list[list[bool]]) -> Trace:
    """Decoded tokens over len(right) + 1 layers of four experts, K = 1: right[l][t], whether layer l + 1 of token t
    is named by the layer before."""
    passes = []
    for token in range(len(right[0])):
        layers = [layer([0], forecasts={1: [(0 if row[token] else 1, 0.9), (0 if not row[token] else 1, 0.1)]})
                  for row in right]  # fmt: skip
        passes.append(decode(*layers, layer([0])))
    return trace_of(passes, top_k=1)


def test_accuracies_per_layer_and_the_boundary() -> None:
    found = _predicted([[True, False, False, False], [True, True, False, False], [True] * 4, [True] * 4])
    accuracy = fate.accuracies(found)
    assert accuracy == [0.0, 0.25, 0.5, 1.0, 1.0]
    assert fate.boundary(accuracy) == 3  # the mean of the predicted ones is .6875
    with pytest.raises(TraceError, match="no forecasts"):
        fate.accuracies(trace_of([decode(layer([0]))], top_k=1, forecast_distances=()))


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [([0.0, 0.9, 0.8, 0.7], 1), ([0.0, 0.5, 0.5], 1), ([0.0, 0.1, 0.2, 0.9], 3), ([0.0, 0.6, 0.7], 2), ([0.0], 1)],
)
def test_boundary_has_the_first_layer_at_least(accuracy: list[float], expected: int) -> None:
    assert fate.boundary(accuracy) == expected


def test_each_layer_has_its_own_window() -> None:
    """10 ms and 1, 2 or 4 experts of 5 ms: 15, 20 and 30 ms; the experts of the layers behind take 8, 4 and 2 ms."""
    times = Times(0.04, {4: 0.005}, 0.0, {4: 0.0})
    found = trace_of([], 8, 4, times=times, layers=4)
    found.header.top_k[:2] = [1, 2]
    found.header.expert_bytes[4] = [800_000, 800_000, 400_000, 200_000]
    assert statistics.windows(found, 4, 1e8) == [1, 5, 15, 0]
    assert statistics.windows(found, 4, 1e6) == [0, 0, 0, 0]
    with pytest.raises(TraceError, match="no computing times"):
        statistics.windows(trace_of([], layers=1), 4, 1)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([(0.1, 0.001), (0.2, 0.009), (0.3, 0.01)], 0.2),
        ([(0.1, 0.02), (0.2, 0.0)], 0.0),
        ([(0.1, -0.01), (0.2, 0.002)], 0.2),
    ],
)
def test_the_largest_share_before_the_loss(losses: list[tuple[float, float]], expected: float) -> None:
    assert fate.largest_share(losses) == expected


def test_bits_by_usage() -> None:
    passes = [decode(layer(chosen)) for chosen in ([0, 1], [0, 1], [0, 2], [3, 4])]
    found = trace_of(passes, 7)
    assert frequencies(found) == [[3, 2, 1, 1, 1, 0, 0]]
    # 30 % of seven are two: 5 and 6; half are three: of 2, 3 and 4, which serve one token each, the higher index
    assert corm.bits_by_usage(found, 4, 2) == [[4, 4, 4, 4, 4, 2, 2]]
    table = corm.bits_by_usage(found, 4, 2, low_share=0.5)
    assert table == [[4, 4, 4, 4, 2, 2, 2]]
    assert corm.low_usage(found, table) == pytest.approx(1 / 8)


def test_routings_are_token_by_token_and_leave_an_encoder_out() -> None:
    passes = [
        prompt(layer([1], [2]), layer([3])),
        decode(layer(), layer([0])),
    ]
    found = trace_of(passes, top_k=1, encoder_layers=1)
    assert list(routings(found)) == [[[], [3]], [[], [0]]]
    decoder = trace_of([prompt(layer([1], [2]), layer([3], [0]))], top_k=1)
    assert list(routings(decoder)) == [[[1], [3]], [[2], [0]]]
    assert count_paths(routings(decoder), 2) == {1: {((1,),): {3: 1}, ((2,),): {0: 1}}}


def _routed(first: int, second: int, forecast: int, little: int) -> Pass:
    passed = decode(layer([first], forecasts={1: [(forecast, 1.0)]}), layer([second]))
    passed.little = Little(0.5, [layer([first]), layer([little])])
    return passed


def test_recall_of_every_predictor() -> None:
    """Calibrated on 0 → 1 (twice), 0 → 2 and 3 → 3; held out: 0 → 1, 0 → 2, 3 → 3, 1 → 1 (never seen)."""
    calibration = trace_of([decode(layer([a]), layer([b])) for a, b in [(0, 1), (0, 1), (0, 2), (3, 3)]], top_k=1)
    held_out = trace_of([_routed(0, 1, 1, 1), _routed(0, 2, 1, 2), _routed(3, 3, 0, 3), _routed(1, 1, 1, 0)], top_k=1)
    expected = {
        "frequent": 0.5,  # always 1
        "path 1": 0.75,  # 1, 1 (wrong), 3, and 1 by frequency
        "path 2": 0.75,
        "next-gate": 0.5,
        "percentile": 0.5,
        "recalled": 0.75,
    }
    assert {name: recalls(calibration, held_out, name) for name in expected} == {
        name: {(1, 1): share} for name, share in expected.items()
    }
