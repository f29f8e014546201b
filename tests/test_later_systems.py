"""The systems of `lab/papers/later`: each rule against a reference that is written from its paper's formula."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_link import Said
from small_traces import decode, layer, prompt, replayed, trace_of
from tiermoe.errors import ConfigError, ProfileError, TraceError
from tiermoe.lab.papers.later import adapmoe, fiddler
from tiermoe.lab.simulate.link import InstantLink
from tiermoe.offload.assembly import ModelShape, PrecisionSlots, assemble
from tiermoe.offload.policies.allotment import Share, by_expected_loads, expected_loads
from tiermoe.offload.policies.eviction import EVICTIONS, Clock, EvictionContext
from tiermoe.offload.policies.prediction import PREDICTIONS, PredictionContext
from tiermoe.offload.policies.routing import AdaptiveGating
from tiermoe.offload.presets import compose
from tiermoe.offload.profiles import Profile
from tiermoe.types import Demand, ExpertKey, Routed

LAYERS, EXPERTS, TOP_K = 3, 4, 2


def matrices(**settings: Any) -> Any:
    context = PredictionContext(LAYERS, [EXPERTS] * LAYERS, [TOP_K] * LAYERS)
    return PREDICTIONS["activation-matrix"](context, **settings)


def run(predictor: Any, passed: list[list[list[int]]]) -> None:
    """A pass: of each layer the tokens' experts."""
    for at, chosen in enumerate(passed):
        predictor.observe(Routed(at, "decode", chosen, [()] * len(chosen)))


def named(predictor: Any, at: int) -> list[tuple[int, int]]:
    return [(wanted.layer, wanted.expert) for wanted in predictor.candidates(at, Said(), lambda *_: True)]


def scaled(rows: numpy.ndarray, length: Any) -> numpy.ndarray:
    size = length(rows)
    return numpy.divide(rows, size, out=numpy.zeros_like(rows), where=size > 0)


def expected(collected: numpy.ndarray, running: numpy.ndarray, at: int, ahead: int, tokens: int) -> list[Any]:
    """MoE-Infinity: what each of the nearest matrices, equal up to rounding, would name."""
    units = [scaled(rows, lambda of: numpy.linalg.norm(of, axis=-1, keepdims=True)) for rows in (collected, running)]
    cosines = (units[0] * units[1]).sum(-1).mean(-1)
    found = []
    for nearest in numpy.flatnonzero(cosines > cosines.max() - 1e-9):
        ratios = scaled(collected[nearest], lambda of: of.sum(-1, keepdims=True))
        wanted = []
        for target in range(at + 1, min(at + 1 + ahead, LAYERS)):
            best = sorted(range(EXPERTS), key=lambda e, row=ratios[target]: (-row[e], e))[: TOP_K * tokens]
            decay = 1 - (target - at) / (LAYERS + 1)
            wanted += [(-ratios[target][e] * decay, target, e) for e in best if ratios[target][e]]
        found.append([(target, e) for _, target, e in sorted(wanted, key=lambda each: each[0])])
    return found


CHOSEN = st.lists(st.integers(0, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K, unique=True)
PASSES = st.sampled_from([1, 1, 3]).flatmap(
    lambda tokens: st.lists(st.lists(CHOSEN, min_size=tokens, max_size=tokens), min_size=LAYERS, max_size=LAYERS)
)
SEQUENCES = st.lists(st.lists(st.tuples(PASSES, st.booleans()), min_size=1, max_size=4), min_size=2, max_size=5)


@settings(max_examples=80, deadline=None)
@given(SEQUENCES, st.integers(1, 3))
def test_the_nearest_matrix_names_what_is_likeliest(sequences: list[Any], ahead: int) -> None:
    """Discarded passes are in no matrix, and the first sequence has nothing to go by."""
    predictor, collected = matrices(ahead=ahead), list[numpy.ndarray]()
    for passes in sequences:
        predictor.new_sequence()
        running = numpy.zeros((LAYERS, EXPERTS))
        for chosen, discarded in passes:
            before = running.copy()
            for at, tokens in enumerate(chosen):
                predictor.observe(Routed(at, "decode", tokens, [()] * len(tokens)))
                numpy.add.at(running[at], list(itertools.chain(*tokens)), 1)
                found = named(predictor, at)
                if collected:
                    assert found in expected(numpy.array(collected), running, at, ahead, len(tokens))
                else:
                    assert found == []
            if discarded:
                predictor.discard_pass()
                running = before
        if running.any():
            collected.append(running)


def test_the_matrix_that_was_nearest_least_often_makes_room() -> None:
    first, second, third = [[[0, 1]]] * LAYERS, [[[1, 2]]] * LAYERS, [[[2, 3]]] * LAYERS
    predictor = matrices(collection=2)
    for passed in (first, second, first, third):  # the third sequence is like the first
        predictor.new_sequence()
        run(predictor, passed)
    predictor.new_sequence()  # [2, 3] comes in the place of [1, 2], whose own place was taken by the second [0, 1]
    run(predictor, [[[2, 3]]])
    assert named(predictor, 0) == [(1, 2), (1, 3)]
    run(predictor, [[[0, 1]]] * LAYERS)
    assert named(predictor, 0) == [(1, 0), (1, 1)]
    assert named(predictor, -1) == [(0, 0), (0, 1)], "before a pass's first layer too"


def test_a_discarded_pass_is_nearest_to_none() -> None:
    first, second = [[[0, 1]]] * LAYERS, [[[1, 2]]] * LAYERS
    predictor = matrices(collection=2)
    for passed in (first, second):
        predictor.new_sequence()
        run(predictor, passed)
    predictor.new_sequence()
    for _ in range(3):
        run(predictor, second)
        predictor.discard_pass()
    run(predictor, first)
    predictor.new_sequence()  # in the place of the second
    run(predictor, [[[1, 2]], [[1, 2]], [[0, 1]]])
    assert named(predictor, 1) == [(2, 0), (2, 1)]


def test_the_scheduler_tells_predictors_of_discarded_passes() -> None:
    composition = compose("moe-infinity", {"routing": "confident", "ahead": "1"})
    link = InstantLink(lambda key: 1)
    scheduler = assemble(composition, ModelShape([4, 4], [2, 2]), [PrecisionSlots((4,), 4)], link, 4)

    def decoded(chosen: list[int]) -> None:
        scheduler.begin_pass(1, Said(), "decode")
        for at in range(2):
            for _ in scheduler.run_layer(Routed(at, "decode", [chosen], [[0.5, 0.5]]), Said()):
                pass

    scheduler.new_sequence()
    decoded([0, 1])
    scheduler.discard_pass()
    decoded([2, 3])
    scheduler.new_sequence()
    decoded([2, 3])
    wanted = list(scheduler.prediction.candidates(0, Said(), lambda *_: True))
    assert [each.expert for each in wanted] == [2, 3]
    assert [each.score for each in wanted] == pytest.approx([0.5 * 2 / 3] * 2)


@given(
    st.lists(st.floats(0.01, 1), min_size=1, max_size=6), st.floats(0, 2), st.sampled_from([0.0, 0.5, 1.0, 3.0])
)  # fmt: skip
def test_the_fewest_experts_run_whose_absence_is_small(
    weights: list[float], threshold: float, sensitivity: float
) -> None:
    kept = AdaptiveGating(threshold, (9.0, sensitivity)).kept(1, weights)
    ranked = sorted(range(len(weights)), key=lambda position: -weights[position])

    def fewest(most: float) -> int:
        left = [sum(weights[position] for position in ranked[count:]) for count in range(len(weights) + 1)]
        return next(count for count in range(1, len(left)) if left[count] * sensitivity <= most * sum(weights))

    assert kept == sorted(ranked[: len(kept)])
    assert fewest(threshold * (1 + 1e-9)) <= len(kept) <= fewest(threshold * (1 - 1e-9)), "up to rounding"


def two_of_eight(accuracy: float, single: float, size: int) -> float:
    """The published program's cost for K = 2 of eight experts. single: share of the tokens that run one."""
    one = (1 - size / 8) * (1 - accuracy)
    both = max((8 - size) * (7 - size) / 56, 0)
    either = (8 - size) * size / 56 * 2
    return single * one + (1 - single) * (2 * both * (1 - accuracy) + both * accuracy + either * (1 - accuracy))


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 8))
def test_expected_loads_are_the_published_formulas(accuracy: float, single: float, size: int) -> None:
    assert expected_loads(8, 2 - single, accuracy, size) == pytest.approx(two_of_eight(accuracy, single, size))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(3, 6), st.floats(1, 3), st.floats(0, 1)), min_size=1, max_size=3),
    st.integers(1, 2),
    st.integers(0, 14),
)
def test_no_other_allotment_expects_fewer_loads(layers: list[Any], minimum: int, more: int) -> None:
    experts, uses, recall = zip(*layers, strict=True)
    slots = min(minimum * len(layers) + more, sum(experts))
    found = [pool.slots for pool in by_expected_loads(Share(slots, experts, 0, minimum, None, recall, uses))]

    def cost(sizes: Any) -> float:
        return sum(expected_loads(*each) for each in zip(experts, uses, recall, sizes, strict=True))

    every = itertools.product(*(range(minimum, count + 1) for count in experts))
    best = min(cost(sizes) for sizes in every if sum(sizes) == slots)
    assert sum(found) == slots
    assert cost(found) == pytest.approx(best, abs=1e-9)


def test_recalls_of_another_number_of_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="layer_recall has 1 numbers and the model 2 MoE layers"):
        by_expected_loads(Share(4, [4, 4], recall=(0.5,), uses=(2.0, 2.0)))
    with pytest.raises(ConfigError, match="layer_recall must be a share for each MoE layer"):
        compose("adapmoe", {"layer_recall": "0.5,1.5"})
    with pytest.raises(ConfigError, match="sensitivity must be a number of at least 0"):
        compose("adapmoe", {"sensitivity": "-1,2"})


def test_calibrations_by_hand() -> None:
    """Weights .9 and .1, then .6 and .4: one expert and two at threshold .1; a prompt's do not count."""
    rows = [decode(layer([0, 1], weights=[gates])) for gates in ([0.9, 0.1], [0.6, 0.4])]
    found = trace_of([*rows, prompt(layer([2, 3], [2, 3]))])
    assert adapmoe.uses(found, AdaptiveGating(0.1, 1.0)) == [1.5]
    assert adapmoe.uses(trace_of([], layers=1), AdaptiveGating(0.1, 1.0)) == [2.0]
    assert fiddler.served(found, 0.5) == 0.5  # each of the four experts serves two tokens


TOKENS = [
    decode(layer([0, 1]), layer([2, 3])),
    decode(layer([0, 2]), layer([2, 0])),
    decode(layer([3, 1]), layer([2, 1])),
]


def test_a_static_placement_is_there_at_the_beginning_and_nothing_moves() -> None:
    """Of two layers of four experts, six slots: layer 1 whole, and experts 0 and 1 of layer 0."""
    found = replayed(
        trace_of(TOKENS), "llama-cpu-moe", slots=6, cpu={4: 0.1}, changes={"room": 0}
    )  # fmt: skip
    assert found.counts.hits == 2 + 2 + 1 + 2 + 1 + 2
    assert found.counts.cpu_fallback == found.counts.misses == 2
    assert found.bytes_read == 0
    assert found.cached_experts == 6


@pytest.mark.parametrize("misses", ["load", "cpu"])
def test_popular_experts_stay_while_a_prompts_come_and_go(misses: str) -> None:
    """The calibration uses experts 0 and 1 of layer 0 and 2 and 3 of layer 1 most. A prompt asks for all, through one
    slot of its own."""
    counts = [[5, 4, 1, 0], [0, 1, 4, 5]]
    profile = Profile("fiddler", "abc", {}, {}, {"frequencies": counts})
    everything = layer([0, 1], [2, 3])
    passes = [decode(layer([0, 1]), layer([2, 3])), prompt(everything, everything), *TOKENS]
    found = replayed(
        trace_of(passes), "fiddler", slots=5, profile=profile, cpu={4: 0.1}, changes={"room": 1, "misses": misses}
    )  # fmt: skip
    decoded = found.metrics.decode.counts
    assert decoded.hits == 4 + sum(expert in (0, 1) for expert in (0, 1, 0, 2, 3, 1)) + 4
    loads = 4 + (0 if misses == "cpu" else decoded.misses)  # of the prompt, two of each layer
    assert found.bytes_read == 100 * loads
    assert decoded.cpu_fallback == (decoded.misses if misses == "cpu" else 0)


def test_popularity_must_be_known() -> None:
    with pytest.raises(ProfileError, match=r"fiddler has no frequencies of experts \(cache=most-frequent\).*--for fid"):
        replayed(trace_of(TOKENS), "fiddler", cpu={4: 0.1})


def test_gate_weights_must_be_known() -> None:
    holds = frozenset({"forecasts"})
    for preset, why in (("hybrimoe", "cache=recent-score"), ("adapmoe", "routing=adaptive")):
        with pytest.raises(TraceError, match=f"no gate weights \\({why}\\)"):
            replayed(trace_of(TOKENS, holds=holds, forecast_distances=[1, 2, 3]), preset)


def test_there_is_room_for_two_layers_and_the_next_ones_experts_are_on_their_way() -> None:
    """A layer's two experts take .8 s of computing, in which those of the next begin to be read. No expert outlives two
    layers: all twelve are read."""
    forecasts = {1: [(2, 0.6), (3, 0.4)]}
    once = decode(layer([0, 1], forecasts=forecasts), layer([2, 3], forecasts={}), layer([0, 1]))
    found = replayed(trace_of([once, once]), "pregated", slots=100, lanes=2)
    assert found.slots == {"4": 4}
    assert found.metrics.decode.counts.speculative_loads == 4
    assert found.metrics.decode.counts.loads == 2 * 4
    assert found.bytes_read == 100 * 2 * 6
    alone = replayed(trace_of([once, once]), "pregated", slots=100, lanes=2, changes={"cache": "none"})
    assert alone.metrics.decode.counts.speculative_loads < 4, "two slots are in use until one of the two is computed"


def test_fewer_experts_are_replayed_as_they_would_run() -> None:
    """.9 and .1: the second expert does not run; in a prompt it does."""
    sure, unsure = ([0, 1], [[0.9, 0.1]]), ([2, 3], [[0.6, 0.4]])
    passes = [decode(layer(sure[0], weights=sure[1])), decode(layer(unsure[0], weights=unsure[1]))]
    passes.append(prompt(layer(sure[0], weights=sure[1])))
    changes = {"layer_recall": "0", "layer_uses": "2"}
    found = replayed(trace_of(passes), "adapmoe", slots=3, changes={**changes, "prefetch": "none"})
    assert found.metrics.decode.counts.hits + found.metrics.decode.counts.misses == 3
    assert found.metrics.prefill.counts.misses + found.metrics.prefill.counts.hits == 2
    assert math.isfinite(found.decode_tok_s)


def test_counts_decay_from_one_sequence_to_the_next() -> None:
    clock = Clock()
    policy = EVICTIONS["decayed"](EvictionContext(clock, 2, 1), half_life=8.0)
    for expert, tokens in ((0, 40), (1, 20)):
        clock.new_sequence()
        policy.new_sequence()
        clock.advance(tokens)
        policy.admitted(ExpertKey(0, expert, 4))
        policy.used(ExpertKey(0, expert, 4), Demand(expert, 1, 4))
    assert policy.victim(ExpertKey(0, 2, 4), lambda _: True) == ExpertKey(0, 0, 4)
