"""ARC against a reference written from the paper's Figure 4 (Megiddo and Modha, FAST 2003), and what an expert cache
adds to it: pins, speculative loads, several loads under way."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from fake_link import one_pool
from tiermoe.offload.cache import ExpertCache
from tiermoe.offload.policies.eviction import Clock, EvictionContext
from tiermoe.offload.policies.eviction.arc import AdaptiveReplacement
from tiermoe.types import Demand, ExpertKey


class TextbookArc:
    """ARC(c) as in the paper's figure, lists with the least recently used page first."""

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


def key(expert: int) -> ExpertKey:
    return ExpertKey(0, expert, 4)


def use(cache: ExpertCache, expert: int) -> bool:
    """One request: a load where it is absent, then the use. True for a hit."""
    hit = cache.slot(key(expert)) is not None
    if not hit:
        load(cache, expert)
    cache.used([key(expert)], [Demand(expert, 1, 4)])
    return hit


def load(cache: ExpertCache, expert: int) -> None:
    assert cache.reserve(key(expert)) is not None
    cache.arrived(key(expert))


def resident(cache: ExpertCache, universe: int = 40) -> set[int]:
    return {expert for expert in range(universe) if cache.slot(key(expert)) is not None}


def arc_cache(slots: int) -> tuple[ExpertCache, AdaptiveReplacement]:
    arc = AdaptiveReplacement(EvictionContext(Clock(), slots, layers=1))
    return one_pool(slots, arc), arc


def agrees(slots: int, trace: list[int]) -> None:
    cache, _ = arc_cache(slots)
    textbook = TextbookArc(slots)
    for step, expert in enumerate(trace):
        assert use(cache, expert) == textbook.request(expert), f"request {step}: {expert}"
        assert resident(cache) == set(textbook.t1) | set(textbook.t2), f"after request {step}: {expert}"


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(0, 13), max_size=120))
def test_single_requests_are_textbook_arc(slots: int, trace: list[int]) -> None:
    agrees(slots, trace)


def test_long_skewed_traces_are_textbook_arc() -> None:
    # phases of loops and of hot sets drive p up and down; every case of the figure occurs
    for seed in range(8):
        draw = random.Random(seed)
        trace: list[int] = []
        while len(trace) < 1500:
            start = draw.randrange(20)
            if draw.random() < 0.5:
                trace += [(start + i) % 40 for i in range(draw.randrange(5, 40))]
            else:
                trace += [int(draw.paretovariate(0.8)) % 40 for _ in range(draw.randrange(5, 60))]
        agrees(draw.randrange(3, 16), trace)


def test_what_was_used_twice_outlives_a_scan() -> None:
    cache, _ = arc_cache(3)
    for expert in (1, 1, 2, 2, 10, 11, 12, 13, 14):
        use(cache, expert)
    assert resident(cache) == {1, 2, 14}


def test_a_ghost_of_t1_moves_the_target() -> None:
    # c = 2: 1 → T2; 2 → T1; 3 takes 2's place (|T1| = 1 > p = 0), B1 = [2]
    cache, _ = arc_cache(2)
    for expert in (1, 1, 2, 3):
        use(cache, expert)
    assert resident(cache) == {1, 3}
    # 2 is a ghost of T1: p = 1, |T1| = 1 is not above it, so T2's least recent leaves: 1
    use(cache, 2)
    assert resident(cache) == {2, 3}
    # 1 is a ghost of T2: p = 0, so T1's 3 leaves
    use(cache, 1)
    assert resident(cache) == {1, 2}


def test_what_was_fetched_and_never_used_leaves_first_and_is_forgotten() -> None:
    cache, _ = arc_cache(3)
    use(cache, 1)
    load(cache, 20)
    load(cache, 21)
    use(cache, 2)
    assert resident(cache) == {1, 2, 21}
    use(cache, 3)
    assert resident(cache) == {1, 2, 3}
    # no ghost: asked for now, 20 comes as a stranger, into T1, and leaves before 1, which is used twice
    use(cache, 1)
    use(cache, 20)
    use(cache, 4)
    use(cache, 5)
    assert resident(cache) == {1, 4, 5}


def test_a_prefetched_key_is_asked_for_once_when_it_is_used_once() -> None:
    cache, _ = arc_cache(2)
    load(cache, 1)
    use(cache, 1)  # the first reference: T1
    use(cache, 2)
    use(cache, 2)  # T2
    use(cache, 3)
    assert resident(cache) == {2, 3}


def test_a_ghost_whose_load_is_abandoned_stays_a_ghost() -> None:
    cache, _ = arc_cache(2)
    for expert in (1, 1, 2, 3):  # T1 = [3], T2 = [1], B1 = [2]
        use(cache, expert)
    # for a ghost of T1 p would be 1, so T2's 1 gives up its slot
    cache.reserve(key(2))
    cache.abandon(key(2))
    assert resident(cache) == {3}
    # still a ghost: T2 = [2] and p = 1; |T1| = 1 is not above it, so 2 leaves for 8 (a stranger would have been in T1
    # behind 3, which would leave)
    use(cache, 2)
    use(cache, 8)
    assert resident(cache) == {3, 8}


def test_an_abandoned_load_says_nothing_about_the_next() -> None:
    cache, _ = arc_cache(2)
    for expert in (1, 1, 2, 3):  # T1 = [3], T2 = [1], B1 = [2]
        use(cache, expert)
    cache.reserve(key(2))  # in place of 1, as above
    cache.abandon(key(2))
    # 8 is a stranger: T1 = [3, 8] and p = 0, so 3 leaves for 7
    use(cache, 8)
    use(cache, 7)
    assert resident(cache) == {7, 8}


def test_a_refused_load_changes_nothing() -> None:
    def hits(refused: bool) -> list[bool]:
        cache, _ = arc_cache(2)
        for expert in (1, 1, 2, 3):
            use(cache, expert)
        if refused:
            cache.pin(key(1))
            cache.pin(key(3))
            assert cache.reserve(key(2)) is None
            cache.unpin(key(1))
            cache.unpin(key(3))
        return [use(cache, expert) for expert in (4, 2, 3, 1, 2, 5, 4)]

    assert hits(refused=True) == hits(refused=False)


def test_a_refused_load_says_nothing_about_the_next() -> None:
    cache, _ = arc_cache(2)
    for expert in (1, 1, 2, 3):  # T1 = [3], T2 = [1], B1 = [2]
        use(cache, expert)
    cache.reserve(key(9))
    cache.pin(key(1))
    assert cache.reserve(key(2)) is None
    cache.abandon(key(9))
    cache.unpin(key(1))
    # 8 is no ghost, as 2 is: it comes to T1 of the free slot and leaves for 7
    use(cache, 8)
    use(cache, 7)
    assert resident(cache) == {1, 7}


def test_pinned_keys_are_passed_over_in_their_order() -> None:
    cache, _ = arc_cache(3)
    for expert in (1, 2, 3, 3):  # T1 = [1, 2], T2 = [3]
        use(cache, expert)
    cache.pin(key(1))
    use(cache, 4)
    assert resident(cache) == {1, 3, 4}
    cache.pin(key(4))
    use(cache, 5)
    assert resident(cache) == {1, 4, 5}
    cache.pin(key(5))
    assert cache.reserve(key(6)) is None


def test_several_loads_under_way_each_change_the_target_by_what_was_so_at_their_start() -> None:
    cache, arc = arc_cache(4)
    for expert in (1, 1, 2, 2, 3, 4, 5, 6):  # T2 = [1, 2], T1 = [5, 6], B1 = [3, 4]
        use(cache, expert)
    assert resident(cache) == {1, 2, 5, 6}
    for expert in (3, 4):
        cache.reserve(key(expert))
    # p would be 1 for either one: |T1| = 2 is above it, then |T1| = 1 is not
    assert resident(cache) == {2, 6}
    for expert in (3, 4):
        cache.arrived(key(expert))
        cache.used([key(expert)], [Demand(expert, 1, 4)])
    assert arc._p == 2.0


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 15)), max_size=150))
def test_ghosts_are_bounded(slots: int, steps: list[tuple[int, int]]) -> None:
    cache, arc = arc_cache(slots)
    for kind, expert in steps:
        if kind < 2 or cache.slot(key(expert)) is not None:
            use(cache, expert)
        else:
            load(cache, expert)
        assert len(arc._t1) + len(arc._b1) <= slots
        assert len(arc._t1) + len(arc._t2) + len(arc._b1) + len(arc._b2) <= 2 * slots
        assert 0 <= arc._p <= slots
        assert len(arc._t1) + len(arc._t2) + len(arc._transit) == len(cache)
