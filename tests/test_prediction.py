"""What each prediction names, against the papers' rules worked out by hand and against numpy's percentile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermoe.errors import ConfigError, ProfileError
from tiermoe.offload.composition import parsed
from tiermoe.offload.policies.prediction import (
    PREDICTIONS,
    PredictionContext,
    Predictor,
    Ranked,
    count_paths,
    paths_from_json,
    paths_to_json,
)
from tiermoe.types import Routed


@dataclass
class Said:
    """Forecasts written down beforehand."""

    gates: Mapping[int, Ranked] = field(default_factory=dict)
    evicted: Mapping[int, Ranked] = field(default_factory=dict)
    tokens: Sequence[int] = ()
    counts: Mapping[int, Ranked] = field(default_factory=dict)

    def ranked(self, target: int) -> Ranked:
        return self.gates.get(target, ())

    def counted(self, target: int) -> Ranked:
        return self.counts.get(target, ())

    def recalled(self, target: int) -> Ranked:
        return self.evicted.get(target, ())

    def token_ids(self) -> Sequence[int]:
        return self.tokens


GATES = {
    1: [(2, 0.5), (0, 0.3), (1, 0.15), (3, 0.05)],
    2: [(3, 0.6), (1, 0.2), (0, 0.15), (2, 0.05)],
    3: [(0, 0.4), (2, 0.35), (3, 0.2), (1, 0.05)],
}


def context(**settings: Any) -> PredictionContext:
    """Four layers of four experts, two per token."""
    return PredictionContext(**{"layers": 4, "experts": [4] * 4, "top_k": [2] * 4} | settings)


def routed(layer: int, *experts: list[int], phase: str = "decode") -> Routed:
    return Routed(layer, phase, experts, [[1 / len(row) for _ in row] for row in experts])


def names(prediction: Predictor, layer: int, said: Said, here: frozenset[tuple[int, int]] = frozenset()) -> list[Any]:
    """(layer, expert) pairs in the order in which they are named."""
    wanted = prediction.candidates(layer, said, lambda *expert: expert in here)
    return [(w.layer, w.expert) for w in wanted]


def test_none_names_nothing() -> None:
    assert names(PREDICTIONS["none"](context()), 0, Said(GATES)) == []


@pytest.mark.parametrize("name", ["next-gate", "neurons"])
def test_next_gate_names_the_top_k_of_each_layer_ahead(name: str) -> None:
    assert names(PREDICTIONS[name](context()), 0, Said(GATES)) == [(1, 2), (1, 0)]
    assert names(PREDICTIONS[name](context(), ahead=2), 0, Said(GATES)) == [(1, 2), (1, 0), (2, 3), (2, 1)]
    assert names(PREDICTIONS[name](context(), ahead=9), 2, Said(GATES)) == [(3, 0), (3, 2)], "no layer after the last"
    assert names(PREDICTIONS[name](context()), 3, Said(GATES)) == []


def test_scores_are_the_predicted_weights() -> None:
    wanted = PREDICTIONS["next-gate"](context()).candidates(0, Said(GATES), lambda layer, expert: False)
    assert [w.score for w in wanted] == [0.5, 0.3]


@pytest.mark.parametrize("name", ["next-gate", "stacked-gates"])
def test_several_tokens_can_choose_more_than_k_together(name: str) -> None:
    predictor = PREDICTIONS[name](context(experts=[9] * 4))
    said = Said({1: [(expert, 1.0) for expert in range(9)]})
    predictor.observe(routed(0, [0, 1], [], [2, 3], [0, 1], phase="prefill"))
    assert len(names(predictor, 0, said)) == 6, "three tokens with two experts each; one row has none"
    predictor.observe(routed(0, *[[0, 1]] * 5, phase="prefill"))
    assert len(names(predictor, 0, said)) == 9, "no more than there are"
    predictor.observe(routed(0, [0, 1]))
    assert len(names(predictor, 0, said)) == 2


def test_stacked_gates_stop_at_the_first_layer_that_lacks_one() -> None:
    predictor = PREDICTIONS["stacked-gates"](context(), ahead=3)
    said = Said(GATES)
    assert names(predictor, 0, said) == [(1, 2), (1, 0)]
    first = {(1, 2), (1, 0)}
    assert names(predictor, 0, said, frozenset({(1, 2)})) == [(1, 2), (1, 0)], "one of the two is not enough"
    assert names(predictor, 0, said, frozenset(first)) == [(1, 2), (1, 0), (2, 3), (2, 1)]
    everything = frozenset(first | {(2, 3), (2, 1), (3, 0), (3, 2)})
    assert names(predictor, 0, said, everything) == [(1, 2), (1, 0), (2, 3), (2, 1), (3, 0), (3, 2)]
    near = PREDICTIONS["stacked-gates"](context(), ahead=1)
    assert names(near, 0, said, everything) == [(1, 2), (1, 0)], "p = 1 looks no further"


def test_stacked_gates_judge_a_layer_before_its_loads_begin() -> None:
    """A load that naming an expert has begun makes it 'on its way', and must not carry the walk on."""
    begun: set[tuple[int, int]] = set()
    predictor = PREDICTIONS["stacked-gates"](context(), ahead=3)
    for wanted in predictor.candidates(0, Said(GATES), lambda *expert: expert in begun):
        begun.add((wanted.layer, wanted.expert))
    assert begun == {(1, 2), (1, 0)}


@given(
    st.lists(st.integers(1, 10_000), min_size=1, max_size=70, unique=True),
    st.integers(0, 100),
)
def test_percentile_is_numpys(weights: list[int], percentile: int) -> None:
    ranked = sorted(enumerate(map(float, weights)), key=lambda named: -named[1])
    # at an exact position numpy's interpolation may round to just below the weight that lies there
    threshold = numpy.percentile(numpy.array(weights, dtype=float), percentile)
    above = [(1, expert) for expert, weight in ranked if weight > threshold + 1e-6]
    predictor = PREDICTIONS["percentile"](
        context(layers=2, experts=[len(weights)] * 2, top_k=[1] * 2), percentile=float(percentile)
    )
    predictor.observe(routed(0, [0]))
    assert names(predictor, 0, Said({1: ranked})) == above


def test_percentile_takes_what_a_replay_still_knows() -> None:
    """15 of 60 experts lie above the 75th percentile (position 44.25); a trace that holds six names these."""
    ranked = [(expert, 1.0 / (expert + 1)) for expert in range(60)]
    predictor = PREDICTIONS["percentile"](context(layers=2, experts=[60] * 2, top_k=[4] * 2))
    predictor.observe(routed(0, [1, 2, 3, 4]))
    assert names(predictor, 0, Said({1: ranked})) == [(1, expert) for expert in range(15)]
    assert names(predictor, 0, Said({1: ranked[:6]})) == [(1, expert) for expert in range(6)]


def test_the_window_bounds_transfers_in_decode() -> None:
    ranked = [(expert, 1.0 / (expert + 1)) for expert in range(60)]
    predictor = PREDICTIONS["percentile"](context(layers=2, experts=[60] * 2, top_k=[4] * 2), window=2)
    predictor.observe(routed(0, [1, 2, 3, 4]))
    assert names(predictor, 0, Said({1: ranked})) == [(1, 0), (1, 1)]
    here = frozenset({(1, 0), (1, 7), (1, 30)})
    assert names(predictor, 0, Said({1: ranked}), here) == [(1, 0), (1, 1), (1, 2), (1, 7)], "what is here costs none"


def test_a_prompts_experts_come_by_popularity_whatever_the_window() -> None:
    """By the number of tokens that choose each, or by the weights' sum: fifteen for each of three tokens."""
    said = Said({1: [(expert, 1.0 / (expert + 1)) for expert in range(60)]}, counts={1: [(7, 3), (2, 1), (9, 1)]})
    of_two = context(layers=2, experts=[60] * 2, top_k=[4] * 2)
    for popularity, expected in {"counts": [7, 2, 9], "weights": list(range(45))}.items():
        predictor = PREDICTIONS["percentile"](of_two, window=1, popularity=popularity)
        predictor.observe(routed(0, *[[1, 2, 3, 4]] * 3, phase="prefill"))
        assert names(predictor, 0, said) == [(1, expert) for expert in expected]
        assert [expert for expert, _ in predictor.ranking(1, said)][:3] == expected[:3]
        predictor.observe(routed(0, [1, 2, 3, 4]))
        assert names(predictor, 0, said) == [(1, 0)], "a decoded token's, by weight"


def test_a_window_of_each_layer_and_of_nothing() -> None:
    ranked = [(expert, 1.0 / (expert + 1)) for expert in range(60)]
    said = Said({1: ranked, 2: ranked})
    of_three = context(layers=3, experts=[60] * 3, top_k=[4] * 3)
    predictor = PREDICTIONS["percentile"](of_three, window=(0, 3, 0))
    predictor.observe(routed(0, [1, 2, 3, 4]))
    assert names(predictor, 0, said, frozenset({(1, 7)})) == [(1, 7)], "what is here is kept, nothing is read"
    assert names(predictor, 1, said) == [(2, 0), (2, 1), (2, 2)]
    with pytest.raises(ConfigError, match="window has 2 numbers and the model 3 MoE layers"):
        PREDICTIONS["percentile"](of_three, window=(1, 2))


@pytest.mark.parametrize(
    ("given", "value"), [("3", 3), ("0", 0), (4, 4), ("3,2,0", (3, 2, 0)), ([1, 0], (1, 0)), ([2], 2)]
)
def test_a_window_is_one_number_or_one_for_each_layer(given: Any, value: Any) -> None:
    assert parsed({"window": given}) == {"window": value}


@pytest.mark.parametrize("given", ["-1", "2,-1", "two", "", "1e9", "99999", []])
def test_what_is_no_window_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="window must be transfers from 0 to 65536"):
        parsed({"window": given})


TOKENS = [
    [[0, 1], [1, 2], [6, 7]],
    [[7, 3], [1, 2], [5, 4]],
    [[3, 7], [2, 1], [5, 0]],
    [[], [8, 9], [5, 6]],
    [[2, 4], [], [5, 6]],
]
"""Experts of three layers for five tokens; the last two do not run in all of them."""


def test_paths_are_counted_by_hand() -> None:
    assert count_paths(TOKENS, 2) == {
        1: {((3, 7),): {1: 2, 2: 2}, ((0, 1),): {1: 1, 2: 1}},
        2: {
            ((1, 2),): {5: 2, 0: 1, 4: 1, 6: 1, 7: 1},
            ((3, 7), (1, 2)): {5: 2, 0: 1, 4: 1},
            ((0, 1), (1, 2)): {6: 1, 7: 1},
            ((8, 9),): {5: 1, 6: 1},
        },
    }
    assert count_paths(TOKENS, 1)[2].keys() == {((1, 2),), ((8, 9),)}


def test_paths_in_json() -> None:
    document = paths_to_json(count_paths(TOKENS, 2))
    assert document["2"]["3,7|1,2"] == {"4": 1, "5": 2, "0": 1}
    assert paths_from_json(document) == count_paths(TOKENS, 2)


@pytest.mark.parametrize("damaged", [[], {"1": 3}, {"x": {}}, {"1": {"a|b": {}}}, {"1": {"1": {"2": None}}}])
def test_damaged_paths_are_refused(damaged: Any) -> None:
    with pytest.raises(ProfileError, match="tiermoe calibrate"):
        paths_from_json(damaged)


def on_paths(path: int = 2, **given: Any) -> Predictor:
    known = {"layers": 3, "experts": [10] * 3, "top_k": [2] * 3, "paths": count_paths(TOKENS, 2)}
    return PREDICTIONS["path"](context(**known | given), path=path)


def test_the_path_names_followers_by_probability() -> None:
    predictor = on_paths()
    predictor.observe(routed(0, [3, 7]))
    assert names(predictor, 0, Said()) == [(1, 1), (1, 2)], "one layer has run: a shorter key"
    predictor.observe(routed(1, [2, 1]))
    wanted = list(predictor.candidates(1, Said(), lambda layer, expert: False))
    assert [(w.expert, w.score) for w in wanted] == [(5, 0.5), (0, 0.25), (4, 0.25)]
    predictor.observe(routed(2, [5, 0]))
    assert names(predictor, 2, Said()) == []


def test_a_path_of_one_layer() -> None:
    predictor = on_paths(path=1)
    predictor.observe(routed(0, [3, 7]))
    predictor.observe(routed(1, [1, 2]))
    assert names(predictor, 1, Said()) == [(2, expert) for expert in (5, 0, 4, 6, 7)]


def test_an_unseen_path_falls_back() -> None:
    predictor = on_paths(frequencies={(1, 4): 0.2, (1, 9): 0.5, (1, 2): 0.0, (2, 1): 1.0})
    predictor.observe(routed(0, [4, 5]))
    assert names(predictor, 0, Said()) == [(1, 9), (1, 4)], "to the layer's frequencies"
    predictor.observe(routed(1, [8, 9]))
    assert names(predictor, 1, Said()) == [(2, 5), (2, 6)], "to the shorter path"


def test_a_path_belongs_to_one_pass_and_one_token() -> None:
    predictor = on_paths()
    predictor.observe(routed(0, [0, 1]))
    predictor.observe(routed(1, [1, 2]))
    predictor.observe(routed(0, [3, 7]))
    assert names(predictor, 1, Said()) == [], "layer 1 of this pass has not run"
    predictor.observe(routed(1, [1, 2]))
    assert names(predictor, 1, Said())[0] == (2, 5)
    predictor.observe(routed(0, [3, 7], [3, 7], phase="prefill"))
    assert names(predictor, 0, Said()) == [], "two tokens"
    predictor.observe(routed(1, [1, 2]))
    assert names(predictor, 1, Said()) == [(2, e) for e in (5, 0, 4, 6, 7)], "what came before is no path"
    predictor.new_sequence()
    assert names(predictor, 1, Said()) == []


def test_an_encoders_layers_are_preloaded_whole_and_make_no_path() -> None:
    predictor = on_paths(encoder_layers=2)
    predictor.observe(routed(0, [3, 7], [1, 2], phase="prefill"))
    assert names(predictor, 0, Said()) == [(1, expert) for expert in range(10)]
    predictor.observe(routed(1, [1, 2], phase="prefill"))
    assert names(predictor, 1, Said()) == [], "the decoder's first layer has nothing before it"


def test_an_encoder_alone_begins_with_its_most_used_experts_and_needs_no_paths() -> None:
    frequencies = {(0, 3): 2.0, (0, 1): 9.0, (1, 0): 9.0, (2, 5): 4.0, (1, 7): 0.0}
    alone = on_paths(paths={}, frequencies=frequencies, encoder_layers=3)
    assert [(wanted.layer, wanted.expert) for wanted in alone.initial_experts()] == [(0, 1), (1, 0), (2, 5), (0, 3)]
    assert {layer for layer, _ in names(alone, 1, Said())} == {2}, "whole layers ahead"
    assert on_paths(frequencies=frequencies, encoder_layers=2).initial_experts() == []


def test_the_most_frequent() -> None:
    frequencies = {(1, 0): 3.0, (1, 1): 5.0, (1, 3): 5.0, (2, 2): 1.0}
    predictor = PREDICTIONS["frequent"](context(frequencies=frequencies))
    assert names(predictor, 0, Said(GATES)) == [(1, 1), (1, 3)]
    assert names(predictor, 1, Said(GATES)) == [(2, 2)], "an expert that was never seen is not named"
    assert names(predictor, 2, Said(GATES)) == []


def test_recalled_starts_before_the_first_layer() -> None:
    evicted = {0: [(3, 0.7), (2, 0.2), (1, 0.1)], 1: [(1, 0.9), (0, 0.1)], 2: [(0, 0.8), (3, 0.1)]}
    predictor = PREDICTIONS["recalled"](context(), ahead=2)
    assert names(predictor, -1, Said(evicted=evicted)) == [(0, 3), (0, 2), (1, 1), (1, 0)]
    assert names(predictor, 0, Said(evicted=evicted)) == [(1, 1), (1, 0), (2, 0), (2, 3)]
    assert names(predictor, 0, Said(GATES)) == [], "no fallback: nothing to recall"


def test_recalled_beside_the_next_gate() -> None:
    evicted = {0: [(3, 0.7), (2, 0.2), (1, 0.1)], 1: [(1, 0.9), (0, 0.1)], 2: [(0, 0.8), (3, 0.1)]}
    predictor = PREDICTIONS["recalled+next-gate"](context(), ahead=2)
    assert names(predictor, -1, Said(GATES, evicted)) == [(0, 3), (0, 2), (1, 1), (1, 0)]
    assert names(predictor, 0, Said(GATES, evicted)) == [(1, 1), (1, 0), (2, 0), (2, 3)], "what is known, not guessed"
    gates = names(PREDICTIONS["next-gate"](context(), ahead=2), 0, Said(GATES))
    predictor.observe(routed(0, [0, 1], phase="prefill"))
    assert names(predictor, 0, Said(GATES)) == gates, "a prompt runs all K"
    assert names(predictor, -1, Said(GATES)) == []
    predictor.observe(routed(0, [0, 1]))
    assert names(predictor, 0, Said(GATES)) == [place for place in gates if place in (gates[0], gates[2])], "K/2 run"
    one = PREDICTIONS["recalled+next-gate"](context(little=2), ahead=2)
    one.observe(routed(0, [0, 1]))
    assert names(one, 0, Said(GATES)) == gates, "little=2"


def test_whole_layers_in_order() -> None:
    assert names(PREDICTIONS["layer"](context()), 1, Said()) == [(2, 0), (2, 1), (2, 2), (2, 3)]


def test_hash_routing_is_known_from_the_tokens() -> None:
    tables = {0: {10: [1, 3], 11: [0, 3]}, 1: {10: [2, 0], 11: [2, 1]}}
    predictor = PREDICTIONS["hash"](context(hash_tables=tables))
    assert names(predictor, -1, Said(tokens=[10])) == [(0, 1), (0, 3)]
    assert names(predictor, -1, Said(tokens=[10, 11])) == [(0, 3), (0, 0), (0, 1)], "most tokens first"
    assert names(predictor, 0, Said(tokens=[11])) == [(1, 1), (1, 2)]
    assert names(predictor, 1, Said(GATES, tokens=[11])) == [], "layer 2 has no table"


def test_hashed_layers_exactly_and_the_others_by_path() -> None:
    seen = count_paths([[[0, 1], [0, 2], [1, 2]], [[0, 1], [1, 3], [0, 3]]], 2)
    told = {"hash_tables": {1: {10: [1, 3]}}, "paths": seen}
    both, path = PREDICTIONS["hash+path"](context(**told)), PREDICTIONS["path"](context(**told))
    for predictor in (both, path):
        predictor.observe(routed(0, [0, 1]))
    assert names(both, 0, Said(tokens=[10])) == [(1, 1), (1, 3)] != names(path, 0, Said(tokens=[10]))
    for predictor in (both, path):
        predictor.observe(routed(1, [1, 3]))
    assert names(both, 1, Said(tokens=[10])) == names(path, 1, Said(tokens=[10])) == [(2, 0), (2, 3)]
    with pytest.raises(ConfigError, match="hash of the token"):
        PREDICTIONS["hash+path"](context(paths=told["paths"]))


def test_the_oracle_is_right() -> None:
    predictor = PREDICTIONS["oracle"](context(future=lambda layer: [layer, 3]), ahead=2)
    assert names(predictor, 0, Said()) == [(1, 1), (1, 3), (2, 2), (2, 3)]


@pytest.mark.parametrize("name", ["frequent", "hash", "oracle", "path"])
def test_what_it_is_made_from_is_required(name: str) -> None:
    with pytest.raises(ConfigError, match=f"prefetch={name} needs"):
        PREDICTIONS[name](context())


@pytest.mark.parametrize("name", sorted(set(PREDICTIONS) - {"recalled", "recalled+next-gate", "hash", "hash+path"}))
def test_only_those_know_something_before_the_first_layer(name: str) -> None:
    """No layer runs at -1, so forecasts that answered all the same must not be taken for one's."""
    filled = context(frequencies={(0, 1): 1.0}, paths=count_paths(TOKENS, 2), future=lambda layer: [0])
    predictor = PREDICTIONS[name](filled)
    predictor.observe(routed(0, [0, 1]))
    assert names(predictor, -1, Said({0: [(0, 1.0)]}, {0: [(0, 1.0)]}, [1])) == []
