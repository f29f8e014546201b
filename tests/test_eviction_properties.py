"""Eviction policies against brute force, and what holds for all of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache as memoised
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evictions import LAYERS, context, key, made, order_of_leaving, use
from tiermoe.decide.cache import ExpertCache
from tiermoe.decide.eviction import EVICTIONS, Eviction
from tiermoe.decide.eviction.protocol import Clock
from tiermoe.types import Demand, ExpertKey

NAMES = sorted(EVICTIONS)

# --- brute force: every score recomputed from a log of uses ---


class Use(NamedTuple):
    token: int
    who: ExpertKey
    tokens: int
    bits: int


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


SCORES: dict[str, Callable[[Log, ExpertKey, Clock, int], Any]] = {
    "lfu": lambda log, who, clock, now: uses_of(log, who),
    "lhu": lambda log, who, clock, now: high_uses_of(log, who),
    "fld": lambda log, who, clock, now: fld_of(who.layer, clock),
    "weighted": weighted_of,
    "distance": distance_of,
}

keys = st.builds(key, st.integers(0, LAYERS - 1), st.integers(0, 2), st.sampled_from([2, 4]))
steps = st.one_of(
    st.tuples(st.just("use"), keys, st.integers(1, 3)),
    st.tuples(st.just("victim"), keys, st.integers(0, 3)),
    st.tuples(st.just("pass"), keys, st.integers(1, 4)),
    st.tuples(st.just("sequence"), keys, st.just(0)),
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(SCORES)), st.booleans(), st.lists(steps, min_size=10, max_size=60))
def test_the_victim_has_the_lowest_score_of_a_brute_force_count(
    name: str, per_sequence: bool, script: list[tuple[str, ExpertKey, int]]
) -> None:
    clock = Clock(token=1)
    policy = made(name, WEIGHTS, clock, encoder_layers=ENCODER, frequencies=PRIOR, per_sequence=per_sequence)
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
            log.append(Use(earlier + clock.token, who, number, bits))
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
            if name == "weighted":  # a sum of floats: equal up to rounding
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
    cache = ExpertCache(slots, policy)
    found = 0
    for now[0], who in enumerate(trace):
        if now[0] == 0 or who.layer < clock.layer:
            clock.advance(1)
        clock.layer = who.layer
        found += cache.slot(who) is not None
        if cache.slot(who) is None:
            assert cache.reserve(who) is not None
            cache.arrived(who)
        cache.used(who, Demand(who.expert, 1, who.bits))
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
    cache = ExpertCache(slots, watched)
    pins: list[ExpertKey] = []
    for step, who in script:
        here, coming = cache.slot(who) is not None, cache.in_flight(who)
        if step == "load" and not here and not coming:
            cache.reserve(who)
        elif step == "arrive" and coming:
            cache.arrived(who)
        elif step == "abandon" and coming:
            cache.abandon(who)
            pins = [pin for pin in pins if pin != who or cache.unpin(who)]
        elif step == "use" and here:
            cache.used(who, Demand(who.expert, 1, who.bits))
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
