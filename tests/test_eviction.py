"""Eviction policies: each formula as an example worked out by hand, brute force, and what holds for all of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache as memoised
from itertools import zip_longest
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_link import one_pool
from tiermoe.errors import ConfigError
from tiermoe.offload.policies.eviction import EVICTIONS, Clock, Eviction, EvictionContext, Popularity
from tiermoe.types import Demand, ExpertKey

LAYERS = 4


def key(layer: int, expert: int, bits: int = 4) -> ExpertKey:
    return ExpertKey(layer, expert, bits)


def context(clock: Clock | None = None, **given: Any) -> EvictionContext:
    values: dict[str, Any] = {"slots": 4, "layers": LAYERS, "next_use": lambda _: math.inf}
    return EvictionContext(clock or Clock(), **(values | given))


def made(name: str, weights: tuple[float, ...], clock: Clock, **given: Any) -> Eviction:
    """A policy by its name, with `weights` where it has any."""
    settings = {"weights": weights} if name == "weighted" else {}
    return EVICTIONS[name](context(clock, **given), **settings)


def use(policy: Eviction, who: ExpertKey, tokens: int = 1, bits: int = 4) -> None:
    policy.used(who, Demand(who.expert, tokens, bits))


def holding(policy: Eviction, *keys: ExpertKey, uses: Sequence[int] = ()) -> Eviction:
    """The policy with `keys` admitted, each used for so many tokens of `uses`, if any."""
    for who, tokens in zip_longest(keys, uses):
        policy.admitted(who)
        if tokens:
            use(policy, who, tokens)
    return policy


def any_key(_: ExpertKey) -> bool:
    return True


def order_of_leaving(policy: Eviction) -> list[ExpertKey]:
    """Empties the policy: everything it knows, in the order in which it gives it up now."""
    leaving = []
    while (victim := policy.victim(key(0, 99), any_key)) is not None:
        policy.removed(victim)
        leaving.append(victim)
    return leaving


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
        policy = holding(EVICTIONS["random"](context(seed=seed)), *(key(0, expert) for expert in range(4)))
        return [policy.victim(key(0, 9), lambda who: who.expert != 3) for _ in range(300)]

    assert choices(1) == choices(1) != choices(2)
    counts = [choices(3).count(key(0, expert)) for expert in range(4)]
    assert counts[3] == 0
    assert min(counts[:3]) > 60  # of 300 among three, 60 lies five standard deviations below 100


def test_lfu_counts_tokens_and_remembers_who_left() -> None:
    policy = holding(EVICTIONS["lfu"](context()), *(key(0, expert) for expert in (1, 2, 3)), uses=(3, 1, 1))
    use(policy, key(0, 2))  # 3, 2 and 1 uses
    policy.removed(key(0, 1))
    policy.admitted(key(0, 1))
    assert order_of_leaving(policy) == [key(0, 3), key(0, 2), key(0, 1)]


def test_ties_of_lfu_go_to_the_least_recently_used() -> None:
    policy = holding(EVICTIONS["lfu"](context()), *(key(0, expert) for expert in (1, 2, 3)))
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
    policy = holding(EVICTIONS["fld"](context(Clock(layer=2))), *(key(layer, 0) for layer in range(LAYERS)))
    # from layer 2 on they run in the order 2, 3, 0, 1
    assert [who.layer for who in order_of_leaving(policy)] == [1, 0, 3, 2]


def test_an_experts_rate_halves_in_32_tokens() -> None:
    # a: 10 uses, then 128 tokens without one: .9 * 10 / 16 = .56
    # b: one use after them: .9
    clock = Clock()
    policy = holding(EVICTIONS["next-use"](context(clock)), key(1, 0), key(1, 1))
    for _ in range(10):
        clock.advance(1)
        use(policy, key(1, 0))
    clock.advance(1)
    assert order_of_leaving(policy) == [key(1, 1), key(1, 0)]
    holding(policy, key(1, 0), key(1, 1))
    for _ in range(128):
        clock.advance(1)
    use(policy, key(1, 1))
    assert order_of_leaving(policy) == [key(1, 0), key(1, 1)]


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
    holding(policy, low, high, other)
    use(policy, other, 2, bits=2)
    use(policy, high, 3, bits=8)
    # one instance serves the high and the low pool: each sees its own keys
    assert policy.victim(key(0, 3, 2), lambda who: who.bits == 2) == other
    assert policy.victim(key(0, 3, 8), lambda who: who.bits == 8) == high


def test_a_use_of_the_other_precision_is_not_recent() -> None:
    policy = hobbit(Clock(token=1), weights=(0.0, 1.0, 0.0, 0.0))
    low, high, other = key(0, 1, 2), key(0, 1, 8), key(0, 2, 2)
    holding(policy, low, high, other)
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
    holding(policy, *(key(layer, 0) for layer in (0, 2, 3)))
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
    holding(policy, key(0, 0), key(2, 0))
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
    holding(policy, a, b, c, d, unused, uses=(1, 6, 1, 1))
    clock.layer = 1
    assert order_of_leaving(policy) == [unused, c, a, b, d]


def test_distance_behind_is_the_formula_that_edgemoe_prints() -> None:
    # S = 4, I = 1, ((S - i + I) mod S) / f: a (layer 2, f 1) 3; b (layer 0, f 6) 1/6; c (layer 3, f 1) 2; d (layer 1) 0
    clock = Clock()
    policy = EVICTIONS["distance"](context(clock), distance="behind")
    a, b, c, d, unused = key(2, 0), key(0, 1), key(3, 2), key(1, 3), key(1, 4)
    holding(policy, a, b, c, d, unused, uses=(1, 6, 1, 1))
    clock.layer = 1
    assert order_of_leaving(policy) == [unused, a, c, b, d]


def test_distance_starts_from_known_frequencies() -> None:
    policy = EVICTIONS["distance"](context(frequencies={(2, 0): 8.0, (2, 1): 1.5}))
    holding(policy, *(key(2, expert) for expert in range(3)), uses=(0, 0, 1))
    assert [who.expert for who in order_of_leaving(policy)] == [2, 1, 0]


def test_experts_of_an_encoder_leave_first() -> None:
    # layers 0 and 1 are the encoder's; the decoder's S = 2 begins at layer 2
    policy = EVICTIONS["distance"](context(encoder_layers=2, frequencies={(0, 0): 50.0}))
    holding(policy, *(key(layer, 0) for layer in (3, 2, 0, 1)), uses=(1, 1, 9, 9))
    assert [who.layer for who in order_of_leaving(policy)] == [0, 1, 3, 2]


@pytest.mark.parametrize(("running", "order"), [(0, [3, 2, 1]), (1, [3, 2, 1]), (2, [3, 1, 2])])
def test_distance_goes_around_the_decoder_alone(running: int, order: list[int]) -> None:
    # layer 0 is the encoder's, S = 3; f = 5, 2, 2 in layers 1, 2, 3
    # while layer 0 or 1 runs: 0, 1/2, 2/2; while layer 2 runs: 2/5, 0, 1/2
    policy = EVICTIONS["distance"](context(Clock(layer=running), encoder_layers=1))
    holding(policy, *(key(layer, 0) for layer in (1, 2, 3)), uses=(5, 2, 2))
    assert [who.layer for who in order_of_leaving(policy)] == order


@pytest.mark.parametrize(("running", "order"), [(0, [1, 2, 0]), (1, [0, 2, 1])])
def test_distance_goes_around_an_encoder_alone(running: int, order: list[int]) -> None:
    # S = 3, f = 2, 4, 10: 1 use each since the calibration
    # while layer 0 runs: 0, 1/4, 2/10; while layer 1 runs: 2/2, 0, 1/10
    frequencies = {(0, 0): 1.0, (1, 0): 3.0, (2, 0): 9.0}
    policy = EVICTIONS["distance"](context(Clock(layer=running), layers=3, encoder_layers=3, frequencies=frequencies))
    holding(policy, *(key(layer, 0) for layer in range(3)), uses=(1, 1, 1))
    assert [who.layer for who in order_of_leaving(policy)] == order


def test_belady_gives_up_what_is_asked_for_last() -> None:
    policy = EVICTIONS["belady"](context(next_use={key(0, 1): 5, key(0, 2): 9, key(0, 3): 1}.__getitem__))
    holding(policy, *(key(0, expert) for expert in (1, 2, 3)))
    assert order_of_leaving(policy) == [key(0, 2), key(0, 1), key(0, 3)]


def test_belady_without_a_future_is_refused() -> None:
    with pytest.raises(ConfigError, match="only a replay"):
        EVICTIONS["belady"](context(next_use=None))


def test_records_per_sequence_are_forgotten_and_per_model_kept() -> None:
    for name in ("lfu", "lhu", "weighted", "distance", "next-use"):
        for per_sequence in (True, False):
            clock = Clock()
            frequencies = {(1, 1): 0.5, (1, 2): 0.5}
            policy = made(name, (0, 0.5, 0.5, 0), clock, per_sequence=per_sequence, frequencies=frequencies)
            clock.advance(8)
            holding(policy, key(1, 1), key(1, 2), uses=(5, 2))
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


NAMES = sorted(EVICTIONS)


# --- brute force: every score recomputed from a log of uses ---
class Use(NamedTuple):
    token: int
    who: ExpertKey
    tokens: int
    bits: int
    running: int  # tokens of the pass


Log = Sequence[Use]


WEIGHTS = (0.4, 0.3, 0.2, 0.1)


PRIOR = {(1, 0): 3.0, (3, 1): 2.0, (0, 2): 1.0}


ENCODER = 1


def uses_of(log: Log, who: ExpertKey) -> int:
    return sum(use.tokens for use in log if use.who == who)


def high_uses_of(log: Log, who: ExpertKey) -> int:
    return sum(use.tokens for use in log if use.who == who and use.bits >= 4)


def fld_of(layer: int, clock: Clock) -> Fraction:
    return 1 - Fraction((layer - clock.layer + LAYERS) % LAYERS, LAYERS)


def weighted_of(log: Log, who: ExpertKey, clock: Clock, now: int) -> Fraction:
    recency = max((use.token for use in log if use.who == who), default=0)
    frequency = sum(use.tokens for use in log if use.who[:2] == who[:2])
    w = [Fraction(str(weight)) for weight in WEIGHTS]
    counts = (Fraction(n, max(now, 1)) for n in (recency, frequency, high_uses_of(log, who)))
    return sum((a * b for a, b in zip(w, (*counts, fld_of(who.layer, clock)), strict=True)), Fraction(0))


def distance_of(log: Log, who: ExpertKey, clock: Clock, now: int) -> tuple[Any, Fraction]:
    """Negated, since the lowest leaves here; of equal ones the fewest uses."""
    frequency = Fraction(PRIOR.get((who.layer, who.expert), 0)) + uses_of(log, who)
    if who.layer < ENCODER or not frequency:
        return -math.inf, Fraction(0)
    return -((who.layer - max(clock.layer, ENCODER)) % (LAYERS - ENCODER)) / frequency, frequency


SHARES = [[0.5, 0.25, 0.0], [0.0, 0.125, 0.5], [0.25, 0.25, 0.25], [1.0, 0.0, 0.0]]


def next_use_of(log: Log, who: ExpertKey, clock: Clock, now: int) -> float:
    """Tokens until the next use, negated: the lowest leaves here."""
    rate = 0.3 * SHARES[who.layer][who.expert]
    for use in log:
        if use.who[:2] == who[:2]:
            for weight, half in ((0.1, 2), (0.9, 32)):
                kept = 0.5 ** (1 / half)
                rate += weight * use.tokens / use.running * (1 - kept**use.running) * kept ** (now - use.token)
    return -((who.layer - clock.layer - 1) % LAYERS) / LAYERS - 1 / max(rate, 1e-4)


SCORES: dict[str, Callable[[Log, ExpertKey, Clock, int], Any]] = {
    "lfu": lambda log, who, clock, now: uses_of(log, who),
    "lhu": lambda log, who, clock, now: high_uses_of(log, who),
    "fld": lambda log, who, clock, now: fld_of(who.layer, clock),
    "weighted": weighted_of,
    "distance": distance_of,
    "next-use": next_use_of,
}


keys = st.builds(key, st.integers(0, LAYERS - 1), st.integers(0, 2), st.sampled_from([2, 4]))


steps = st.one_of(
    st.tuples(st.just("use"), keys, st.integers(1, 3)),
    st.tuples(st.just("victim"), keys, st.integers(0, 3)),
    st.tuples(st.just("pass"), keys, st.sampled_from([1, 2, 4, 40])),
    st.tuples(st.just("sequence"), keys, st.just(0)),
)


@pytest.mark.parametrize("name", sorted(SCORES))
@settings(max_examples=80, deadline=None)
@given(st.booleans(), st.lists(steps, min_size=10, max_size=60))
def test_the_victim_has_the_lowest_score_of_a_brute_force_count(
    name: str, per_sequence: bool, script: list[tuple[str, ExpertKey, int]]
) -> None:
    clock = Clock(token=1)
    known = {"encoder_layers": ENCODER, "frequencies": PRIOR, "popularity": Popularity(SHARES)}
    policy = made(name, WEIGHTS, clock, per_sequence=per_sequence, **known)
    log: list[Use] = []
    earlier = 0  # tokens of the sequences before, while records go on
    resident: list[ExpertKey] = []  # least recently used first
    for step, who, number in script:
        if step == "use":
            if who in resident:
                resident.remove(who)
            else:
                policy.admitted(who)
            resident.append(who)
            bits = min(who.bits, 2 * number)
            log.append(Use(earlier + clock.token, who, number, bits, clock.running))
            use(policy, who, number, bits)
        elif step == "pass":
            clock.advance(number)
            clock.layer = who.layer
        elif step == "sequence":
            if per_sequence:
                log.clear()
            earlier = max((use.token for use in log), default=0)
            clock.new_sequence()
            policy.new_sequence()
        else:
            evictable = [other for other in resident if (other.layer + other.expert) % 4 != number]
            victim = policy.victim(who, evictable.__contains__)
            scores = {other: SCORES[name](log, other, clock, earlier + clock.token) for other in evictable}
            if not evictable:
                assert victim is None
                continue
            assert victim in evictable
            if name in ("weighted", "next-use"):  # a sum of floats: equal up to rounding
                assert float(scores[victim]) == pytest.approx(float(min(scores.values())))
            else:  # the first in the order of use among the lowest
                assert victim == min(evictable, key=scores.__getitem__)
            policy.removed(victim)
            resident.remove(victim)


# --- what holds for every policy ---
def future(trace: Sequence[ExpertKey], clock: list[int]) -> Callable[[ExpertKey], float]:
    def next_use(who: ExpertKey) -> float:
        return next((t - clock[0] for t in range(clock[0] + 1, len(trace)) if trace[t] == who), math.inf)

    return next_use


def hits(name: str, slots: int, trace: Sequence[ExpertKey]) -> int:
    """Of single requests: a load where the key is absent, then one use."""
    now, clock = [0], Clock()
    policy = EVICTIONS[name](context(clock, slots=slots, next_use=future(trace, now)))
    cache = one_pool(slots, policy)
    found = 0
    for now[0], who in enumerate(trace):
        if now[0] == 0 or who.layer < clock.layer:
            clock.advance(1)
        clock.layer = who.layer
        found += cache.slot(who) is not None
        if cache.slot(who) is None:
            assert cache.reserve(who) is not None
            cache.arrived(who)
        cache.used([who], [Demand(who.expert, 1, who.bits)])
    return found


def best_possible(slots: int, trace: Sequence[ExpertKey]) -> int:
    """Most hits of any demand replacement, by trying every victim."""

    @memoised
    def most(step: int, held: frozenset[ExpertKey]) -> int:
        if step == len(trace):
            return 0
        who = trace[step]
        if who in held:
            return 1 + most(step + 1, held)
        if len(held) < slots:
            return most(step + 1, held | {who})
        return max(most(step + 1, held - {victim} | {who}) for victim in held)

    return most(0, frozenset())


requests = st.builds(key, st.integers(0, 2), st.integers(0, 1))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.lists(requests, max_size=14))
def test_beladys_hits_are_the_most_possible(slots: int, trace: list[ExpertKey]) -> None:
    assert hits("belady", slots, trace) == best_possible(slots, trace)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 6), st.lists(st.builds(key, st.integers(0, LAYERS - 1), st.integers(0, 2)), min_size=10, max_size=80)
)
def test_no_policy_has_more_hits_than_belady(slots: int, trace: list[ExpertKey]) -> None:
    bound = hits("belady", slots, trace)
    for name in NAMES:
        assert hits(name, slots, trace) <= bound, name


def test_no_policy_has_more_hits_than_belady_over_tokens() -> None:
    # as a model asks: layer by layer, two experts each, some far more often than others
    draw = random.Random(5)
    trace = [
        key(layer, expert)
        for _ in range(60)
        for layer in range(LAYERS)
        for expert in sorted({int(draw.paretovariate(0.7)) % 8, int(draw.paretovariate(0.7)) % 8})
    ]
    for slots in (4, 10, 20):
        found = {name: hits(name, slots, trace) for name in NAMES}
        assert max(found, key=found.__getitem__) == "belady"
        assert len(set(found.values())) > 4


class Watched:
    """A policy under observation: its victims must be evictable, and there must be one wherever one is evictable."""

    def __init__(self, policy: Eviction) -> None:
        self.policy = policy
        self.held: set[ExpertKey] = set()

    def admitted(self, who: ExpertKey) -> None:
        self.held.add(who)
        self.policy.admitted(who)

    def used(self, who: ExpertKey, demand: Demand) -> None:
        self.policy.used(who, demand)

    def removed(self, who: ExpertKey) -> None:
        self.held.remove(who)
        self.policy.removed(who)

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        victim = self.policy.victim(incoming, evictable)
        allowed = set(filter(evictable, self.held))
        assert victim in allowed if allowed else victim is None
        return victim

    def new_sequence(self) -> None:
        self.policy.new_sequence()


operations = st.lists(
    st.tuples(st.sampled_from(["load", "arrive", "abandon", "use", "pin", "unpin", "pass", "new"]), keys), max_size=80
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NAMES), st.booleans(), st.integers(1, 5), operations)
def test_bookkeeping_never_leaks(
    name: str, per_sequence: bool, slots: int, script: list[tuple[str, ExpertKey]]
) -> None:
    clock = Clock()
    watched = Watched(EVICTIONS[name](context(clock, slots=slots, per_sequence=per_sequence, encoder_layers=1)))
    cache = one_pool(slots, watched)
    pins: list[ExpertKey] = []
    for step, who in script:
        here, coming = cache.slot(who) is not None, who in cache.in_flight
        if step == "load" and not here and not coming:
            cache.reserve(who)
        elif step == "arrive" and coming:
            cache.arrived(who)
        elif step == "abandon" and coming:
            cache.abandon(who)
            pins = [pin for pin in pins if pin != who or cache.unpin(who)]
        elif step == "use" and here:
            cache.used([who], [Demand(who.expert, 1, who.bits)])
        elif step == "pin" and (here or coming):
            cache.pin(who)
            pins.append(who)
        elif step == "unpin" and pins:
            cache.unpin(pins.pop())
        elif step == "pass":
            clock.advance(1)
            clock.layer = who.layer
        elif step == "new":
            clock.new_sequence()
            cache.new_sequence()
    held = set(watched.held)
    assert len(held) <= slots
    assert sorted(order_of_leaving(watched.policy)) == sorted(held)
