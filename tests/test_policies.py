"""Eviction policies and predictors by three properties, each for all of them: nobody leaves that is in use, and nobody
is named that cannot come; every choice is that of a reference that looks through the whole history; what is taken back
leaves no trace."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from typing import Any, NamedTuple

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_link import Said, one_pool
from tiermoe.errors import ConfigError, ProfileError
from tiermoe.offload.cache import ExpertCache
from tiermoe.offload.composition import parsed
from tiermoe.offload.policies.eviction import EVICTIONS, Clock, Eviction, EvictionContext, Popularity, Undoable
from tiermoe.offload.policies.prediction import (
    PREDICTIONS,
    PredictionContext,
    Predictor,
    Ranked,
    count_paths,
    paths_from_json,
    paths_to_json,
)
from tiermoe.types import Demand, ExpertKey, Routed

LAYERS, EXPERTS = 4, 3
WEIGHTS = (0.4, 0.3, 0.2, 0.1)
FREQUENCIES = {(1, 0): 3.0, (3, 1): 2.0, (0, 2): 1.0}
SHARES = [[0.5, 0.25, 0.0], [0.0, 0.125, 0.5], [0.25, 0.25, 0.25], [1.0, 0.0, 0.0]]
KEYS = st.builds(ExpertKey, st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1), st.sampled_from([2, 4]))


def context(clock: Clock | None = None, **given: Any) -> EvictionContext:
    values: dict[str, Any] = {
        "slots": 4, "layers": LAYERS, "next_use": lambda _: math.inf, "frequencies": FREQUENCIES,
    }  # fmt: skip
    return EvictionContext(clock or Clock(), **(values | given))


def settings_of(name: str) -> dict[str, Any]:
    """Settings without which a policy cannot be made."""
    return {"weights": WEIGHTS} if name == "weighted" else {}


def chosen_with(who: ExpertKey, number: int) -> Routed:
    """`number` tokens that choose an expert, and the one after it with the rest of their weight."""
    weight, other = number / 4, (who.expert + 1) % EXPERTS
    return Routed(who.layer, "decode", [[who.expert, other]] * number, [[weight, 1 - weight]] * number)


def tell(name: str, policy: Any, who: ExpertKey) -> None:
    """The policy `name` that a token uses an expert."""
    if name == "recent-score":
        policy.routed(chosen_with(who, 1))
    policy.used(who, Demand(who.expert, 1, who.bits))


def any_key(_: ExpertKey) -> bool:
    return True


def order_of_leaving(policy: Eviction) -> list[ExpertKey]:
    """Empties the policy: everything it knows, in the order in which it gives it up now."""
    leaving = []
    while (victim := policy.victim(ExpertKey(0, 99, 4), any_key)) is not None:
        policy.removed(victim)
        leaving.append(victim)
    return leaving


# eviction: who leaves


class Use(NamedTuple):
    token: int
    who: ExpertKey
    tokens: int
    bits: int
    running: int  # tokens of the pass


class History:
    """What a policy was told."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.uses: list[Use] = []  # since records were forgotten
        self.routed: list[Routed] = []  # the same
        self.earlier = 0  # tokens of the sequences before, up to the last use in each, while records go on
        self.admitted: list[ExpertKey] = []  # those that have a slot
        self.touched: list[ExpertKey] = []  # the same, by their last admission or use
        self.later: Sequence[ExpertKey] = ()  # who will be used

    @property
    def now(self) -> int:
        return self.earlier + self.clock.token

    def admit(self, who: ExpertKey) -> None:
        self.admitted.append(who)
        self.touched.append(who)

    def use(self, who: ExpertKey, tokens: int, bits: int) -> None:
        self.touched.remove(who)
        self.touched.append(who)
        self.uses.append(Use(self.now, who, tokens, bits, self.clock.running))

    def remove(self, who: ExpertKey) -> None:
        self.admitted.remove(who)
        self.touched.remove(who)

    def next_use(self, who: ExpertKey) -> float:
        return next((at for at, other in enumerate(self.later) if other == who), math.inf)

    def tokens(self, who: ExpertKey, least_bits: int = 0) -> int:
        return sum(use.tokens for use in self.uses if use.who == who and use.bits >= least_bits)


def nearness(history: History, layer: int) -> Fraction:
    return 1 - Fraction((layer - history.clock.layer + LAYERS) % LAYERS, LAYERS)


def weighted(history: History, who: ExpertKey) -> Fraction:
    """HOBBIT, equation 3."""
    recency = max((use.token for use in history.uses if use.who == who), default=0)
    frequency = sum(use.tokens for use in history.uses if use.who[:2] == who[:2])
    terms = [Fraction(n, max(history.now, 1)) for n in (recency, frequency, history.tokens(who, least_bits=4))]
    weights = [Fraction(str(weight)) for weight in WEIGHTS]
    return sum((a * b for a, b in zip(weights, [*terms, nearness(history, who.layer)], strict=True)), Fraction(0))


def distance(encoder: int = 0, behind: bool = False) -> Callable[[History, ExpertKey], Any]:
    """EdgeMoE, section 3.3.3, negated; of equal ones the fewest uses."""
    first = encoder % LAYERS  # an encoder alone goes round as a decoder does

    def score(history: History, who: ExpertKey) -> tuple[Any, Fraction]:
        frequency = Fraction(FREQUENCIES.get(who[:2], 0)) + history.tokens(who)
        if who.layer < first or not frequency:
            return -math.inf, Fraction(0)
        ahead = who.layer - max(history.clock.layer, first)
        return -((-ahead if behind else ahead) % (LAYERS - first)) / frequency, frequency

    return score


def estimated(history: History, who: ExpertKey) -> float:
    """Tokens until the next use, negated."""
    rate = 0.3 * SHARES[who.layer][who.expert]
    for use in history.uses:
        if use.who[:2] == who[:2]:
            for weight, half in ((0.1, 2), (0.9, 32)):
                kept = 0.5 ** (1 / half)
                rate += weight * use.tokens / use.running * (1 - kept**use.running) * kept ** (history.now - use.token)
    return -((who.layer - history.clock.layer - 1) % LAYERS) / LAYERS - 1 / max(rate, 1e-4)


def activation(history: History, who: ExpertKey) -> float:
    """MoE-Infinity: the expert's share of its layer's row, and the depth of the layer."""
    row = sum(use.tokens for use in history.uses if use.who.layer == who.layer)
    return (history.tokens(who) / max(row, 1) + 1e-8) * (1 - who.layer / LAYERS)


def decayed(history: History, who: ExpertKey) -> float:
    """LRFU, as a logarithm: half of a use is left after 8 tokens."""
    left = [use.tokens * 0.5 ** ((history.now - use.token) / 8) for use in history.uses if use.who == who]
    return math.log2(sum(left)) if left else -math.inf


def recent_score(history: History, who: ExpertKey) -> float:
    """HybriMoE's recurrence over the passes of the layer, as a logarithm."""
    score = 0.0
    for routed in history.routed:
        if routed.layer == who.layer:
            gates = [dict(zip(*row, strict=True)) for row in zip(routed.experts, routed.weights, strict=True)]
            newest = sum(row.get(who.expert, 0.0) for row in gates) / len(gates)
            score = 0.25 * newest + (1 - 0.25) * score
    return math.log2(score) if score else -math.inf


@dataclass
class Rule:
    """Who leaves: the lowest score, of equal ones the first `among` them. rounded: scores are sums of floats, equal up
    to rounding; certainly equal are those of copies of one expert."""

    name: str
    score: Callable[[History, ExpertKey], Any]
    settings: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    among: Callable[[History], list[ExpertKey]] = lambda history: history.touched
    rounded: bool = False

    def check(self, victim: ExpertKey, evictable: Sequence[ExpertKey], history: History) -> None:
        scores = {who: self.score(history, who) for who in self.among(history) if who in evictable}
        if self.rounded:
            assert float(scores[victim]) == pytest.approx(float(min(scores.values())))
            scores = {who: score for who, score in scores.items() if who[:2] == victim[:2]}
        assert victim == min(scores, key=scores.__getitem__)


RULES = {
    "fifo": Rule("fifo", lambda history, who: history.admitted.index(who)),
    "lru": Rule("lru", lambda history, who: history.touched.index(who)),
    "lfu": Rule("lfu", History.tokens),
    "lhu": Rule("lhu", lambda history, who: history.tokens(who, least_bits=4)),
    "fld": Rule("fld", lambda history, who: nearness(history, who.layer)),
    "weighted": Rule("weighted", weighted, {"weights": WEIGHTS}, rounded=True),
    "distance": Rule("distance", distance()),
    "distance behind": Rule("distance", distance(behind=True), {"distance": "behind"}),
    "distance behind an encoder": Rule("distance", distance(1), given={"encoder_layers": 1}),
    "distance in an encoder": Rule("distance", distance(LAYERS), given={"encoder_layers": LAYERS}),
    "next-use": Rule("next-use", estimated, among=lambda history: history.admitted, rounded=True),
    "activation-ratio": Rule("activation-ratio", activation, rounded=True),
    "decayed": Rule("decayed", decayed, {"half_life": 8.0}, rounded=True),
    "recent-score": Rule("recent-score", recent_score, {"alpha": 0.25}, rounded=True),
    "last-layers": Rule("last-layers", lambda history, who: (who.layer, -who.expert, who.bits)),
    "most-frequent": Rule(
        "most-frequent", lambda history, who: (FREQUENCIES.get(who[:2], 0.0), -who.layer, -who.expert, who.bits)
    ),
    "belady": Rule("belady", lambda history, who: -history.next_use(who)),
}
STEPS = st.one_of(
    st.tuples(st.just("load"), KEYS, st.just(0)),
    st.tuples(st.just("use"), KEYS, st.integers(1, 3)),
    st.tuples(st.just("victim"), KEYS, st.integers(0, 3)),
    st.tuples(st.just("pass"), KEYS, st.sampled_from([1, 2, 4, 40])),
    st.tuples(st.just("sequence"), KEYS, st.just(0)),
)


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.lists(STEPS, min_size=10, max_size=60))
def test_who_leaves_is_the_references_choice(
    name: str, per_sequence: bool, script: list[tuple[str, ExpertKey, int]]
) -> None:
    rule, clock = RULES[name], Clock(token=1)
    history = History(clock)
    known = {"frequencies": FREQUENCIES, "popularity": Popularity(SHARES), "next_use": history.next_use}
    policy = EVICTIONS[rule.name](
        context(clock, per_sequence=per_sequence, **(known | rule.given)), **rule.settings
    )  # fmt: skip
    for at, (step, who, number) in enumerate(script):
        history.later = [other for later, other, _ in script[at + 1 :] if later == "use"]
        if step == "load" and rule.rounded:
            # else most victims are of those never used; next-use ranks once for all misses, which no use follows
            step, number = "use", 1
        if step in ("load", "use") and who not in history.admitted:
            policy.admitted(who)
            history.admit(who)
        if step == "use":
            bits = min(who.bits, 2 * number)
            if rule.name == "recent-score":
                history.routed.append(chosen_with(who, number))
                policy.routed(history.routed[-1])  # type: ignore[attr-defined]
            policy.used(who, Demand(who.expert, number, bits))
            history.use(who, number, bits)
        elif step == "pass":
            clock.advance(number)
            clock.layer = who.layer
        elif step == "sequence":
            if per_sequence:
                history.uses.clear()
                history.routed.clear()
            history.earlier = max((use.token for use in history.uses), default=0)
            clock.new_sequence()
            policy.new_sequence()
        elif step == "victim":
            evictable = [other for other in history.admitted if (other.layer + other.expert) % 4 != number]
            victim = policy.victim(who, evictable.__contains__)
            if victim is not None:
                rule.check(victim, evictable, history)
                policy.removed(victim)
                history.remove(victim)
            else:
                assert not evictable


class TextbookArc:
    """ARC(c) of the paper's Figure 4 (Megiddo and Modha, FAST 2003); lists have the least recently used page first."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def request(self, x: int) -> bool:
        c = self.c
        if x in self.t1 or x in self.t2:  # case I
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
            return True
        if x in self.b1:  # case II
            delta = 1.0 if len(self.b1) >= len(self.b2) else len(self.b2) / len(self.b1)
            self.p = min(self.p + delta, c)
            self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
            return False
        if x in self.b2:  # case III
            delta = 1.0 if len(self.b2) >= len(self.b1) else len(self.b1) / len(self.b2)
            self.p = max(self.p - delta, 0.0)
            self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
            return False
        total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
        if len(self.t1) + len(self.b1) == c:  # case IV A
            if len(self.t1) < c:
                self.b1.pop(0)
                self.replace(x)
            else:
                self.t1.pop(0)
        elif total >= c:  # case IV B
            if total == 2 * c:
                self.b2.pop(0)
            self.replace(x)
        self.t1.append(x)
        return False

    def replace(self, x: int) -> None:
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))


def use(cache: ExpertCache, expert: int) -> bool:
    """One request: a load where it is absent, then the use. True for a hit."""
    key = ExpertKey(0, expert, 4)
    hit = cache.slot(key) is not None
    if not hit:
        assert cache.reserve(key) is not None
        cache.arrived(key)
    cache.used([key], [Demand(expert, 1, 4)])
    return hit


def resident(cache: ExpertCache) -> set[int]:
    return {expert for expert in range(40) if cache.slot(ExpertKey(0, expert, 4)) is not None}


LOOPS = st.lists(st.tuples(st.integers(0, 13), st.integers(1, 9)), max_size=30)
"""Where a run of experts begins, and its length: loops and hot sets drive ARC's target up and down."""


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6), LOOPS)
def test_single_requests_are_textbook_arc(slots: int, loops: list[tuple[int, int]]) -> None:
    cache, textbook = one_pool(slots, EVICTIONS["arc"](context(slots=slots))), TextbookArc(slots)
    for expert in chain.from_iterable(((first + i) % 14 for i in range(count)) for first, count in loops):
        assert use(cache, expert) == textbook.request(expert)
        assert resident(cache) == set(textbook.t1) | set(textbook.t2)


GHOST = "1 1 2 3"
"""Of two slots: T1 = [3], T2 = [1], and 2 is a ghost of T1."""


@pytest.mark.parametrize(
    ("slots", "script", "here"),
    [
        # what was loaded and never used leaves first
        (3, "1 +20 +21 2", {1, 2, 21}),
        (3, "1 +20 +21 2 3", {1, 2, 3}),
        # and leaves no ghost: 21 comes as a stranger, into T1, and leaves before 1, which is used twice
        (3, "1 +20 +21 2 3 1 21 4 5", {1, 4, 5}),
        # a prefetched key is asked for once when it is used once: 1 in T1, 2 in T2
        (2, "+1 1 2 2 3", {2, 3}),
        # for a ghost of T1 p would be 1, so T2's 1 gives up its slot
        (2, f"{GHOST} -2", {3}),
        # its load is abandoned, and it is a ghost yet: T2 = [2] and p = 1, |T1| = 1 is not above it
        (2, f"{GHOST} -2 2 8", {3, 8}),
        # an abandoned load says nothing about the next: 8 is a stranger, T1 = [3, 8] and p = 0
        (2, f"{GHOST} -2 8 7", {7, 8}),
        # nor does one that is refused, while 1 is pinned and 9 is under way
        (2, f"{GHOST} >9 (1 !2 x9 )1 8 7", {1, 7}),
        # pinned keys are passed over in their order: T1 = [1, 2], T2 = [3]
        (3, "1 2 3 3 (1 4", {1, 3, 4}),
        (3, "1 2 3 3 (1 4 (4 5 (5 !6", {1, 4, 5}),
        # two loads under way: p would be 1 for either, |T1| = 2 is above it, then |T1| = 1 is not
        (4, "1 1 2 2 3 4 5 6 >3 >4", {2, 6}),
        # both together make p 2: T1 = [6], T2 = [2, 3, 4] and the ghosts 5 and 1; 7 and 8 take places of T2's
        (4, "1 1 2 2 3 4 5 6 >3 >4 <3 <4 7 8", {4, 6, 7, 8}),
    ],
)  # fmt: skip
def test_arc_with_loads_that_are_no_requests(slots: int, script: str, here: set[int]) -> None:
    """n: a request. +n: a load without one. >n, <n, xn: a load begins, ends with its use, is abandoned; -n: both. !n:
    one that is refused. (n, )n: a pin's begin and end."""
    cache = one_pool(slots, EVICTIONS["arc"](context(slots=slots)))
    for word in script.split():
        key = ExpertKey(0, int(word.strip("+-<>x!()")), 4)
        if word[0] in "+>-x!":
            if word[0] != "x":
                assert (cache.reserve(key) is None) is (word[0] == "!")
            if word[0] in "-x":
                cache.abandon(key)
            elif word[0] == "+":
                cache.arrived(key)
        elif word[0] == "<":
            cache.arrived(key)
            cache.used([key], [Demand(key.expert, 1, 4)])
        elif word[0] in "()":
            (cache.pin if word[0] == "(" else cache.unpin)(key)
        else:
            use(cache, key.expert)
    assert resident(cache) == here


def test_random_repeats_itself_for_a_seed_and_reaches_everyone() -> None:
    def choices(seed: int) -> list[int]:
        policy = EVICTIONS["random"](context(seed=seed))
        for expert in range(4):
            policy.admitted(ExpertKey(0, expert, 4))
        named = [policy.victim(ExpertKey(0, 9, 4), lambda who: who.expert != 3) for _ in range(300)]
        return [who.expert for who in named if who is not None]

    assert choices(1) == choices(1) != choices(2)
    counts = Counter(choices(3))
    assert sum(counts.values()) == 300
    assert min(counts[expert] for expert in range(3)) > 60  # of 300 among three, five standard deviations below 100


def test_belady_without_a_future_is_refused() -> None:
    with pytest.raises(ConfigError, match="only a replay"):
        EVICTIONS["belady"](context(next_use=None))


# eviction: who may leave


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


DEEDS = st.sampled_from(["load", "load", "arrive", "abandon", "use", "pin", "pin", "unpin", "pass", "new"])
FEW = st.sampled_from(
    [ExpertKey(*place) for place in ((0, 0, 4), (0, 0, 2), (0, 1, 4), (1, 0, 4), (2, 0, 4), (3, 0, 4))]
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(EVICTIONS)), st.booleans(), st.integers(1, 4), st.lists(st.tuples(DEEDS, FEW), max_size=80)
)
def test_nobody_leaves_that_is_in_use_and_nothing_is_forgotten(
    name: str, per_sequence: bool, slots: int, script: list[tuple[str, ExpertKey]]
) -> None:
    clock = Clock()
    given = {"slots": slots, "per_sequence": per_sequence, "encoder_layers": 1}
    watched = Watched(EVICTIONS[name](context(clock, **given), **settings_of(name)))
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
        assert all(cache.slot(pin) is not None or pin in cache.in_flight for pin in pins)
    held = set(watched.held)
    assert len(held) <= slots
    assert sorted(order_of_leaving(watched.policy)) == sorted(held)


# eviction: what is taken back


@pytest.mark.parametrize("name", sorted(set(EVICTIONS) - {"random"}))
@settings(max_examples=30, deadline=None)
@given(st.lists(KEYS, min_size=5, max_size=40), st.lists(st.tuples(st.booleans(), KEYS), max_size=12))
def test_a_pass_that_is_discarded_leaves_no_use_behind(
    name: str, before: list[ExpertKey], discarded: list[tuple[bool, ExpertKey]]
) -> None:
    """Two equal policies of four slots; one is told of uses that are undone, both of who came and left meanwhile."""
    clock = Clock()
    told = Undoable(EVICTIONS[name](given := context(clock), **settings_of(name)), given)
    other = EVICTIONS[name](context(clock), **settings_of(name))
    held: list[ExpertKey] = []

    def admit(who: ExpertKey) -> None:
        if who in held:
            return
        if len(held) == 4:
            victim = told.victim(who, any_key)
            assert victim is not None
            other.victim(who, {victim}.__contains__)  # policies learn from being asked
            for policy in (told, other):
                policy.removed(victim)
            held.remove(victim)
        for policy in (told, other):
            policy.admitted(who)
        held.append(who)

    for who in before:
        clock.advance(1)
        admit(who)
        for policy in (told, other):
            tell(name, policy, who)
    clock.advance(1)
    told.start()
    for uses, who in discarded:
        admit(who)
        if uses:
            tell(name, told, who)
    told.undo()
    assert order_of_leaving(told) == order_of_leaving(other)


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(set(EVICTIONS) - {"random"})),
    used=st.lists(st.integers(0, 7), min_size=5, max_size=60),
    lent=st.sets(st.integers(10, 19), min_size=1, max_size=4),
)
def test_prefetches_that_are_taken_back_leave_every_policy_as_it_was(
    name: str, used: list[int], lent: set[int]
) -> None:
    """Requests one by one through two equal caches, one of which lends slots between them and gives them back."""
    plain, lending = (one_pool(3, EVICTIONS[name](context(slots=3), **settings_of(name))) for _ in range(2))
    for expert in used:
        assert use(plain, expert) == use(lending, expert)
        ahead = [ExpertKey(0, each, 4) for each in lent]
        for key in [key for key in ahead if lending.reserve_speculatively(key) is not None]:
            lending.cancel(key)


# prediction: what is named

TOP_K = 2
CALIBRATION = [
    [[0, 1], [1, 2], [2, 3], [0, 1]],
    [[1, 3], [1, 2], [1, 0], [0, 2]],
    [[3, 1], [2, 1], [1, 0], [3, 2]],
    [[], [0, 3], [1, 2], [1, 3]],
    [[2, 0], [], [1, 2], [2, 3]],
]
"""Experts of each layer for five tokens; the last two do not run in all of them."""
HASHES = {0: [[1, 3], [0, 3], [2, 0]], 1: [[2, 0], [2, 1], [3, 1]]}
"""Layer → experts of each token."""


@dataclass
class Moment:
    """When a predictor is asked: while `layer` runs, after what routers have said in this pass."""

    layer: int
    said: Said
    here: frozenset[tuple[int, int]]  # (layer, expert) that are cached
    passed: Mapping[int, Routed] = field(default_factory=dict)  # by layer
    last: Routed | None = None
    ahead: int = 1
    encoder: int = 0

    @property
    def tokens(self) -> int:
        """Of the running pass, those that use experts."""
        return max(1, sum(bool(row) for row in self.last.experts) if self.last else 1)

    @property
    def decodes(self) -> bool:
        return self.last is not None and self.last.phase == "decode"

    @property
    def targets(self) -> range:
        return range(self.layer + 1, min(self.layer + 1 + self.ahead, LAYERS))

    @property
    def running(self) -> range:
        """The same while a layer runs, none before the first one."""
        return self.targets if self.layer >= 0 else range(0)


Named = Iterator[tuple[int, int]]


def first(target: int, ranked: Ranked, count: int) -> Named:
    return ((target, expert) for expert, _ in ranked[:count])


def by_gates(moment: Moment) -> Named:
    """Eliseev and Mazur: as many as the tokens' choices can name together."""
    for target in moment.running:
        yield from first(target, moment.said.ranked(target), TOP_K * moment.tokens)


def by_walk(moment: Moment) -> Named:
    """HOBBIT: up to the first layer that lacks one."""
    for target in moment.running:
        named = list(first(target, moment.said.ranked(target), TOP_K * moment.tokens))
        yield from named
        if not moment.here.issuperset(named):
            return


def by_percentile(moment: Moment) -> Named:
    """Fate, sections 4.2 and 4.3: above the percentile of one token's weights, in decode one transfer."""
    left = 1
    for target in moment.running:
        threshold = numpy.percentile(range(4), 60)
        above = sum(rank > threshold for rank in range(4)) * moment.tokens
        prompt = moment.last is None or moment.last.phase == "prefill"
        ranked = moment.said.counted(target) if prompt else moment.said.ranked(target)
        for place in first(target, ranked, above):
            if prompt or place in moment.here or left:
                left -= not prompt and place not in moment.here
                yield place


def by_recall(moment: Moment) -> Named:
    """MoBiLE, section III-B."""
    for target in moment.targets:
        yield from first(target, moment.said.recalled(target), TOP_K * moment.tokens)


def by_recall_and_gates(moment: Moment) -> Named:
    """MoBiLE with pre-gating: as many of a little pass as it runs."""
    for target in moment.targets:
        if recalled := moment.said.recalled(target):
            yield from first(target, recalled, TOP_K * moment.tokens)
        elif moment.layer >= 0:
            each = TOP_K // 2 if moment.decodes else TOP_K
            yield from first(target, moment.said.ranked(target), each * moment.tokens)


def by_frequency(target: int) -> list[tuple[int, float]]:
    seen = ((expert, FREQUENCIES.get((target, expert), 0.0)) for expert in range(4))
    return sorted((each for each in seen if each[1]), key=lambda each: -each[1])


def by_path(moment: Moment, length: int = 2) -> Named:
    """EdgeMoE, section 3.3.2, through the calibration's tokens: those that went the same way lately."""
    target, passed = moment.layer + 1, {at: set(routed.experts[0]) for at, routed in moment.passed.items()}
    if target < moment.encoder:
        yield from first(target, [(expert, 1.0) for expert in range(4)], 4)
    elif moment.layer in passed and target < LAYERS:
        for count in range(length, 0, -1):
            way = [(at, passed.get(at)) for at in range(target - count, target)]
            alike = [
                token[target] for token in CALIBRATION
                if token[target] and all(chosen and set(token[at]) == chosen for at, chosen in way if at >= 0)
            ]  # fmt: skip
            if alike and all(at >= 0 and chosen for at, chosen in way):
                counts = Counter(expert for chosen in alike for expert in chosen)
                yield from first(target, sorted(counts.items(), key=lambda each: (-each[1], each[0])), TOP_K)
                return
        yield from first(target, by_frequency(target), TOP_K)


def by_hash(moment: Moment) -> Named:
    """EdgeMoE, section 3.1: those of most tokens first."""
    for target in set(moment.targets) & HASHES.keys():
        counts = Counter(expert for token in moment.said.token_ids() for expert in HASHES[target][token])
        yield from first(target, sorted(counts.items(), key=lambda each: (-each[1], each[0])), 4)


def by_hash_or_path(moment: Moment) -> Named:
    return by_hash(moment) if moment.layer + 1 in HASHES else by_path(moment)


def future(layer: int) -> list[int]:
    return [layer % 3, 3]


AHEAD = {"ahead": 2}
PREDICTORS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Callable[[Moment], Named]]] = {
    "none": ("none", {}, {}, lambda moment: iter(())),
    "next-gate": ("next-gate", AHEAD, {}, by_gates),
    "neurons": ("neurons", AHEAD, {}, by_gates),
    "stacked-gates": ("stacked-gates", AHEAD, {}, by_walk),
    "percentile": ("percentile", AHEAD | {"percentile": 60.0, "window": 1}, {}, by_percentile),
    "recalled": ("recalled", AHEAD, {}, by_recall),
    "recalled+next-gate": ("recalled+next-gate", AHEAD, {}, by_recall_and_gates),
    "frequent": (
        "frequent", AHEAD, {},
        lambda moment: chain.from_iterable(
            first(target, by_frequency(target), TOP_K * moment.tokens) for target in moment.running
        ),
    ),
    "layer": (
        "layer", AHEAD, {}, lambda moment: ((target, expert) for target in moment.running for expert in range(4))
    ),
    "oracle": (
        "oracle", AHEAD, {},
        lambda moment: ((target, expert) for target in moment.running for expert in future(target)),
    ),
    "path": ("path", {}, {}, by_path),
    "path of one layer": ("path", {"path": 1}, {}, lambda moment: by_path(moment, 1)),
    "path behind an encoder": ("path", {}, {"encoder_layers": 2}, by_path),
    "hash": ("hash", {}, {}, by_hash),
    "hash+path": ("hash+path", {}, {}, by_hash_or_path),
}  # fmt: skip
"""Prediction, settings, what its context is given, and the reference."""


def prediction_context(**given: Any) -> PredictionContext:
    known: dict[str, Any] = {
        "layers": LAYERS, "experts": [4] * LAYERS, "top_k": [TOP_K] * LAYERS, "paths": count_paths(CALIBRATION, 2),
        "frequencies": FREQUENCIES, "hash_tables": HASHES, "future": future,
    }  # fmt: skip
    return PredictionContext(**known | given)


CHOSEN = st.lists(st.integers(0, 3), min_size=TOP_K, max_size=TOP_K, unique=True)
ORDERS = st.dictionaries(st.integers(0, LAYERS - 1), st.permutations(range(4)))


@st.composite
def moments(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """What happens to a predictor: ('sequence', None), ('routed', a layer's choices) or ('asked', a moment)."""
    script: list[tuple[str, Any]] = []
    for _ in range(draw(st.integers(1, 4))):
        tokens = draw(st.sampled_from([1, 1, 1, 3]))
        weighed = [
            {at: [(expert, 1 / (rank + 2)) for rank, expert in enumerate(order)] for at, order in draw(ORDERS).items()}
            for _ in range(3)
        ]
        recalled = weighed[1] if draw(st.booleans()) else {}
        said = Said(weighed[0], recalled, weighed[2], draw(st.lists(st.integers(0, 2))))
        here = draw(st.frozensets(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, 3))))
        phase = "prefill" if tokens > 1 else draw(st.sampled_from(["decode", "decode", "prefill"]))
        if draw(st.booleans()):
            script.append(("sequence", None))
        script.append(("asked", (-1, said, here)))
        for layer in range(draw(st.integers(0, 1)), LAYERS):
            like = draw(st.sampled_from(CALIBRATION))[layer]
            chosen = [like or draw(CHOSEN), *(draw(st.just([]) | CHOSEN) for _ in range(tokens - 1))]
            weights = [[1 / len(row) for _ in row] for row in chosen]
            script += [("routed", Routed(layer, phase, chosen, weights)), ("asked", (layer, said, here))]
    return script


def named(predictor: Predictor, layer: int, said: Said, here: frozenset[tuple[int, int]] = frozenset()) -> list[Any]:
    """(layer, expert) pairs in the order in which they are named."""
    return [(w.layer, w.expert) for w in predictor.candidates(layer, said, lambda *place: place in here)]


@pytest.mark.parametrize("name", PREDICTORS)
@settings(max_examples=60, deadline=None)
@given(script=moments())
def test_what_is_named_can_come_and_is_the_references_choice(name: str, script: list[tuple[str, Any]]) -> None:
    """Asking changes nothing, and a new sequence begins as the first one did."""
    prediction, options, given, reference = PREDICTORS[name]
    predictor = PREDICTIONS[prediction](prediction_context(**given), **options)
    passed: dict[int, Routed] = {}
    last: Routed | None = None
    encoder = given.get("encoder_layers", 0)
    for what, value in script:
        if what == "sequence":
            predictor.new_sequence()
            passed.clear()
        elif what == "routed":
            predictor.observe(value)
            last = value
            if passed and value.layer <= max(passed):
                passed.clear()  # another pass
            if Moment(0, Said(), frozenset(), last=value).tokens == 1 and value.layer >= encoder:
                passed[value.layer] = value
        else:
            layer, said, here = value
            moment = Moment(layer, said, here, passed, last, options.get("ahead", 1), encoder)
            found = named(predictor, layer, said, here)
            assert found == list(reference(moment))
            assert found == named(predictor, layer, said, here)
            assert len(set(found)) == len(found)
            assert all(layer < target < LAYERS and 0 <= expert < 4 for target, expert in found)


def test_every_predictor_and_every_policy_has_a_reference() -> None:
    others = {"activation-matrix"}  # tests/test_later_systems.py
    assert {name for name, *_ in PREDICTORS.values()} == set(PREDICTIONS) - others
    assert {rule.name for rule in RULES.values()} == set(EVICTIONS) - {"random", "arc"}


def test_the_walk_judges_a_layer_before_its_loads_begin() -> None:
    """A load that naming an expert has begun makes it 'on its way', and must not carry the walk on."""
    begun: set[tuple[int, int]] = set()
    said = Said({layer: [(layer, 0.5), (0, 0.3)] for layer in (1, 2)})
    predictor = PREDICTIONS["stacked-gates"](prediction_context(), ahead=3)
    for wanted in predictor.candidates(0, said, lambda *place: place in begun):
        begun.add((wanted.layer, wanted.expert))
    assert begun == {(1, 1), (1, 0)}


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=70, unique=True), st.integers(0, 100))
def test_percentile_is_numpys(weights: list[int], percentile: int) -> None:
    ranked = sorted(enumerate(map(float, weights)), key=lambda named: -named[1])
    # at an exact position numpy's interpolation may round to just below the weight that lies there
    threshold = numpy.percentile(numpy.array(weights, dtype=float), percentile)
    above = [(1, expert) for expert, weight in ranked if weight > threshold + 1e-6]
    of_two = prediction_context(layers=2, experts=[len(weights)] * 2, top_k=[1] * 2)
    predictor = PREDICTIONS["percentile"](of_two, percentile=float(percentile))
    predictor.observe(Routed(0, "decode", [[0]], [[1.0]]))
    assert named(predictor, 0, Said({1: ranked})) == above


def test_a_window_of_each_layer_and_a_prompts_experts_by_weight() -> None:
    ranked = [(expert, 1.0 / (expert + 1)) for expert in range(60)]
    said = Said({1: ranked, 2: ranked}, counted={1: [(7, 3), (2, 1), (9, 1)]})
    of_three = prediction_context(layers=3, experts=[60] * 3, top_k=[4] * 3)
    predictor = PREDICTIONS["percentile"](of_three, window=(0, 3, 0), popularity="weights")
    predictor.observe(Routed(0, "decode", [[1, 2, 3, 4]], [[0.25] * 4]))
    assert named(predictor, 0, said, frozenset({(1, 7)})) == [(1, 7)], "what is here is kept, nothing is read"
    assert named(predictor, 1, said) == [(2, 0), (2, 1), (2, 2)]
    predictor.observe(Routed(0, "prefill", [[1, 2, 3, 4]] * 3, [[0.25] * 4] * 3))
    assert named(predictor, 0, said) == [(1, expert) for expert in range(45)], "fifteen for each of three tokens"
    assert [expert for expert, _ in predictor.ranking(1, said)] == list(range(60))
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


def test_paths_in_json() -> None:
    counted = count_paths(CALIBRATION, 2)
    document = paths_to_json(counted)
    assert document["2"]["1,3|1,2"] == {"0": 2, "1": 2}
    assert paths_from_json(document) == counted


@pytest.mark.parametrize("damaged", [[], {"1": 3}, {"x": {}}, {"1": {"a|b": {}}}, {"1": {"1": {"2": None}}}])
def test_damaged_paths_are_refused(damaged: Any) -> None:
    with pytest.raises(ProfileError, match="tiermoe calibrate"):
        paths_from_json(damaged)


def test_an_encoder_alone_begins_with_its_most_used_experts_and_needs_no_paths() -> None:
    alone = PREDICTIONS["path"](prediction_context(paths={}, encoder_layers=LAYERS))
    assert [(wanted.layer, wanted.expert) for wanted in alone.initial_experts()] == [(1, 0), (3, 1), (0, 2)]
    assert {layer for layer, _ in named(alone, 1, Said())} == {2}, "whole layers ahead"
    assert PREDICTIONS["path"](prediction_context(encoder_layers=2)).initial_experts() == []


@pytest.mark.parametrize("name", ["frequent", "hash", "oracle", "path", "hash+path"])
def test_what_it_is_made_from_is_required(name: str) -> None:
    nothing: dict[str, Any] = {"frequencies": {}, "hash_tables": {}, "future": None}
    given = nothing if name == "hash+path" else nothing | {"paths": {}}
    with pytest.raises(ConfigError, match=f"prefetch={name.split('+')[0]} needs"):
        PREDICTIONS[name](prediction_context(**given))
