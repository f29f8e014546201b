"""Eviction policies: each formula as an example worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from evictions import LAYERS, context, key, made, order_of_leaving, use
from tiermoe.decide.eviction import EVICTIONS, Eviction
from tiermoe.decide.eviction.protocol import Clock
from tiermoe.errors import ConfigError
from tiermoe.types import ExpertKey


def test_fifo_goes_by_arrival_and_lru_by_use() -> None:
    expected = {"fifo": [1, 2, 3], "lru": [2, 1, 3]}
    for name, order in expected.items():
        policy = EVICTIONS[name](context())
        for expert in (1, 2):
            policy.admitted(key(0, expert))
        use(policy, key(0, 1))
        policy.admitted(key(0, 3))
        assert order_of_leaving(policy) == [key(0, expert) for expert in order], name


def test_random_repeats_itself_for_a_seed_and_reaches_everyone() -> None:
    def choices(seed: int) -> list[ExpertKey | None]:
        policy = EVICTIONS["random"](context(seed=seed))
        for expert in range(4):
            policy.admitted(key(0, expert))
        return [policy.victim(key(0, 9), lambda who: who.expert != 3) for _ in range(300)]

    assert choices(1) == choices(1) != choices(2)
    counts = [choices(3).count(key(0, expert)) for expert in range(4)]
    assert counts[3] == 0
    assert min(counts[:3]) > 60  # of 300 among three, 60 lies five standard deviations below 100


def test_lfu_counts_tokens_and_remembers_who_left() -> None:
    policy = EVICTIONS["lfu"](context())
    for expert, tokens in ((1, 3), (2, 1), (3, 1)):
        policy.admitted(key(0, expert))
        use(policy, key(0, expert), tokens)
    use(policy, key(0, 2))  # 3, 2 and 1 uses
    policy.removed(key(0, 1))
    policy.admitted(key(0, 1))
    assert order_of_leaving(policy) == [key(0, 3), key(0, 2), key(0, 1)]


def test_ties_of_lfu_go_to_the_least_recently_used() -> None:
    policy = EVICTIONS["lfu"](context())
    for expert in (1, 2, 3):
        policy.admitted(key(0, expert))
    for expert in (2, 3, 1):
        use(policy, key(0, expert))
    assert order_of_leaving(policy) == [key(0, 2), key(0, 3), key(0, 1)]


def test_lhu_prefers_few_high_uses_to_many_low_ones() -> None:
    # HOBBIT, figure 11: expert 4 is used more, expert 6 more often in high precision
    uses = {4: (9, 2), 6: (1, 5)}
    expected = {"lfu": [6, 4], "lhu": [4, 6]}
    for name, order in expected.items():
        policy = EVICTIONS[name](context(high_bits=8))
        for expert, (low, high) in uses.items():
            policy.admitted(key(0, expert, 8))
            use(policy, key(0, expert, 8), tokens=low, bits=2)
            use(policy, key(0, expert, 8), tokens=high, bits=8)
        assert [who.expert for who in order_of_leaving(policy)] == order, name


def test_fld_takes_the_layer_that_runs_last() -> None:
    clock = Clock(layer=2)
    policy = EVICTIONS["fld"](context(clock))
    for layer in range(LAYERS):
        policy.admitted(key(layer, 0))
    # from layer 2 on they run in the order 2, 3, 0, 1
    assert [who.layer for who in order_of_leaving(policy)] == [1, 0, 3, 2]


def hobbit(clock: Clock, weights: tuple[float, ...], **given: Any) -> Eviction:
    return made("weighted", weights, clock, high_bits=8, **given)


def test_weighted_is_hobbits_priority() -> None:
    # weights .4 .3 .2 .1, l_n = 4, T = 10, l_i = 1
    # a: layer 2, R = 4, F = 5, H = 1: .4*.4 + .3*.5 + .2*.1 + .1*(1 - 1/4) = .405
    # b: layer 1, R = 10, F = 1, H = 0: .4*1 + .3*.1 + 0 + .1*(1 - 0) = .53
    # c: layer 0, R = 2, F = 2, H = 2: .4*.2 + .3*.2 + .2*.2 + .1*(1 - 3/4) = .205
    # d: layer 3, R = 8, F = 1, H = 0: .4*.8 + .3*.1 + 0 + .1*(1 - 2/4) = .40
    clock = Clock()
    policy = hobbit(clock, weights=(0.4, 0.3, 0.2, 0.1))
    a, b, c, d = key(2, 0, 8), key(1, 1, 8), key(0, 2, 8), key(3, 3, 8)
    for who, token, tokens, bits in ((c, 2, 2, 8), (a, 3, 4, 2), (a, 4, 1, 8), (d, 8, 1, 2), (b, 10, 1, 2)):
        clock.token, clock.layer = token, who.layer
        if token in (2, 3, 8, 10):
            policy.admitted(who)
        use(policy, who, tokens, bits)
    clock.token, clock.layer = 10, 1
    assert order_of_leaving(policy) == [c, d, a, b]


@pytest.mark.parametrize(("weight", "order"), [(0, "bac"), (1, "abc"), (2, "acb"), (3, "cba")])
def test_each_of_the_four_terms_counts_alone(weight: int, order: str) -> None:
    clock = Clock()
    policy = hobbit(clock, weights=tuple(float(i == weight) for i in range(4)))
    names = {key(0, 0, 8): "a", key(1, 1, 8): "b", key(2, 2, 8): "c"}
    a, b, c = names
    for who in names:
        policy.admitted(who)
    # R: b 4, a 5, c 9; F: a 2, b 8, c 9; H: a 0, c 1, b 8; from layer 0 on, c's layer 2 runs last
    for who, token, tokens, bits in ((b, 4, 8, 8), (a, 5, 2, 2), (c, 8, 8, 2), (c, 9, 1, 8)):
        clock.token = token
        use(policy, who, tokens, bits)
    assert "".join(names[who] for who in order_of_leaving(policy)) == order


def test_weighted_counts_a_use_of_either_precision_for_both() -> None:
    clock = Clock(token=1)
    policy = hobbit(clock, weights=(0.0, 1.0, 0.0, 0.0))
    low, high, other = key(0, 1, 2), key(0, 1, 8), key(0, 2, 2)
    for who in (low, high, other):
        policy.admitted(who)
    use(policy, other, 2, bits=2)
    use(policy, high, 3, bits=8)
    # one instance serves the high and the low pool: each sees its own keys
    assert policy.victim(key(0, 3, 2), lambda who: who.bits == 2) == other
    assert policy.victim(key(0, 3, 8), lambda who: who.bits == 8) == high


def test_a_use_of_the_other_precision_is_not_recent() -> None:
    policy = hobbit(Clock(token=1), weights=(0.0, 1.0, 0.0, 0.0))
    low, high, other = key(0, 1, 2), key(0, 1, 8), key(0, 2, 2)
    for who in (low, high, other):
        policy.admitted(who)
    use(policy, other, 3, bits=2)
    use(policy, high, 3, bits=8)
    assert order_of_leaving(policy) == [low, other, high]


@pytest.mark.parametrize(("per_sequence", "order"), [(False, [3, 0, 2]), (True, [3, 2, 0])])
def test_tokens_are_counted_over_sequences_where_records_are_kept(per_sequence: bool, order: list[int]) -> None:
    # w_lru = w_fld = .5, l_n = 4, l_i = 0; layer 0 is never used, 2 and 3 at token 6; four tokens of the next sequence
    # kept: T = 10; layer 0: .5, 2: .5*6/10 + .5*2/4 = .55, 3: .5*6/10 + .5*1/4 = .425
    # forgotten: .5, .25, .125
    clock = Clock(token=6)
    policy = hobbit(clock, weights=(0.5, 0.0, 0.0, 0.5), per_sequence=per_sequence)
    for layer in (0, 2, 3):
        policy.admitted(key(layer, 0))
    use(policy, key(2, 0))
    use(policy, key(3, 0))
    clock.new_sequence()
    policy.new_sequence()
    policy.new_sequence()  # of the second pool that it serves
    clock.advance(4)
    assert [who.layer for who in order_of_leaving(policy)] == order


def test_tokens_of_earlier_sequences_do_not_count_where_records_are_forgotten() -> None:
    # weights as above; layer 2 is used at token 1 of T = 4: .5*1/4 + .5*2/4 = .375, layer 0 never: .5
    clock = Clock(token=8)
    policy = hobbit(clock, weights=(0.5, 0.0, 0.0, 0.5), per_sequence=True)
    for layer in (0, 2):
        policy.admitted(key(layer, 0))
    use(policy, key(2, 0))
    clock.new_sequence()
    policy.new_sequence()
    clock.advance(1)
    use(policy, key(2, 0))
    clock.advance(3)
    assert [who.layer for who in order_of_leaving(policy)] == [2, 0]


def test_distance_is_edgemoes_score() -> None:
    # S = 4, I = 1, ((i - I) mod S) / f: a (layer 2, f 1) 1; b (layer 0, f 6) .5; c (layer 3, f 1) 2; d (layer 1) 0
    clock = Clock()
    policy = EVICTIONS["distance"](context(clock))
    a, b, c, d, unused = key(2, 0), key(0, 1), key(3, 2), key(1, 3), key(1, 4)
    for who, tokens in ((a, 1), (b, 6), (c, 1), (d, 1)):
        policy.admitted(who)
        use(policy, who, tokens)
    policy.admitted(unused)
    clock.layer = 1
    assert order_of_leaving(policy) == [unused, c, a, b, d]


def test_distance_starts_from_known_frequencies() -> None:
    policy = EVICTIONS["distance"](context(Clock(), frequencies={(2, 0): 8.0, (2, 1): 1.5}))
    for expert in (0, 1, 2):
        policy.admitted(key(2, expert))
    use(policy, key(2, 2))
    assert [who.expert for who in order_of_leaving(policy)] == [2, 1, 0]


def test_experts_of_an_encoder_leave_first() -> None:
    # layers 0 and 1 are the encoder's; the decoder's S = 2 begins at layer 2
    clock = Clock(layer=0)
    policy = EVICTIONS["distance"](context(clock, encoder_layers=2, frequencies={(0, 0): 50.0}))
    for layer in (3, 2, 0, 1):
        policy.admitted(key(layer, 0))
        use(policy, key(layer, 0), tokens=9 if layer < 2 else 1)
    assert [who.layer for who in order_of_leaving(policy)] == [0, 1, 3, 2]


@pytest.mark.parametrize(("running", "order"), [(0, [3, 2, 1]), (1, [3, 2, 1]), (2, [3, 1, 2])])
def test_distance_goes_around_the_decoder_alone(running: int, order: list[int]) -> None:
    # layer 0 is the encoder's, S = 3; f = 5, 2, 2 in layers 1, 2, 3
    # while layer 0 or 1 runs: 0, 1/2, 2/2; while layer 2 runs: 2/5, 0, 1/2
    policy = EVICTIONS["distance"](context(Clock(layer=running), encoder_layers=1))
    for layer, tokens in ((1, 5), (2, 2), (3, 2)):
        policy.admitted(key(layer, 0))
        use(policy, key(layer, 0), tokens)
    assert [who.layer for who in order_of_leaving(policy)] == order


@pytest.mark.parametrize(("running", "order"), [(0, [1, 2, 0]), (1, [0, 2, 1])])
def test_distance_goes_around_an_encoder_alone(running: int, order: list[int]) -> None:
    # S = 3, f = 2, 4, 10: 1 use each since the calibration
    # while layer 0 runs: 0, 1/4, 2/10; while layer 1 runs: 2/2, 0, 1/10
    frequencies = {(0, 0): 1.0, (1, 0): 3.0, (2, 0): 9.0}
    policy = EVICTIONS["distance"](context(Clock(layer=running), layers=3, encoder_layers=3, frequencies=frequencies))
    for layer in (0, 1, 2):
        policy.admitted(key(layer, 0))
        use(policy, key(layer, 0), 1)
    assert [who.layer for who in order_of_leaving(policy)] == order


def test_belady_gives_up_what_is_asked_for_last() -> None:
    policy = EVICTIONS["belady"](context(next_use={key(0, 1): 5, key(0, 2): 9, key(0, 3): 1}.__getitem__))
    for expert in (1, 2, 3):
        policy.admitted(key(0, expert))
    assert order_of_leaving(policy) == [key(0, 2), key(0, 1), key(0, 3)]


def test_belady_without_a_future_is_refused() -> None:
    with pytest.raises(ConfigError, match="only a replay"):
        EVICTIONS["belady"](context(next_use=None))


def test_records_per_sequence_are_forgotten_and_per_model_kept() -> None:
    for name in ("lfu", "lhu", "weighted", "distance"):
        for per_sequence in (True, False):
            clock = Clock()
            frequencies = {(1, 1): 0.5, (1, 2): 0.5}
            policy = made(name, (0, 0.5, 0.5, 0), clock, per_sequence=per_sequence, frequencies=frequencies)
            clock.advance(8)
            for expert, tokens in ((1, 5), (2, 2)):
                policy.admitted(key(1, expert))
                use(policy, key(1, expert), tokens)
            policy.removed(key(1, 1))
            clock.new_sequence()
            policy.new_sequence()
            policy.admitted(key(1, 1))
            clock.advance(3)
            use(policy, key(1, 2), 1)
            use(policy, key(1, 1), 1)
            use(policy, key(1, 2), 1)
            # kept: 6 uses of expert 1, 4 of expert 2; forgotten: 1 and 2
            assert order_of_leaving(policy)[0].expert == (1 if per_sequence else 2), name
