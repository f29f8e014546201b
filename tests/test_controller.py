"""The controller's decisions against a link that finishes loads in any order and may fail: no weights, no files."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caches import lru
from fake_link import controller_with, demands
from groups import each
from tiermoe.decide.cache import ExpertCache
from tiermoe.decide.link import Finished
from tiermoe.errors import LoadError
from tiermoe.types import Demand, ExpertKey


def test_misses_are_loaded_and_hits_are_not() -> None:
    controller, link = controller_with(4)
    assert sorted(expert for expert, *_ in each(controller.run_layer(0, demands(3, 1)))) == [1, 3]
    assert len(link.submitted) == 2
    assert sorted(expert for expert, *_ in each(controller.run_layer(0, demands(1, 3)))) == [1, 3]
    assert len(link.submitted) == 2
    assert (controller.counts.hits, controller.counts.misses, controller.counts.loads) == (2, 2, 2)


def test_what_is_here_comes_before_what_must_arrive() -> None:
    controller, _ = controller_with(4)
    list(controller.run_layer(0, demands(5)))
    assert next(each(controller.run_layer(0, demands(2, 5))))[0] == 5


def test_hits_are_computed_while_misses_are_under_way() -> None:
    controller, link = controller_with(4)
    list(controller.run_layer(0, demands(5)))
    run = each(controller.run_layer(0, demands(5, 6, 7)))
    assert next(run)[0] == 5
    assert [load.key.expert for load in link.submitted[1:]] == [6, 7]
    list(run)


def test_most_used_experts_come_first() -> None:
    controller, link = controller_with(8)
    wanted = [Demand(0, 1, 4), Demand(1, 9, 4), Demand(2, 4, 4)]
    list(controller.run_layer(0, wanted))
    assert [load.key.expert for load in link.submitted] == [1, 2, 0]


def test_the_least_recently_used_expert_leaves() -> None:
    controller, link = controller_with(2)
    list(controller.run_layer(0, demands(0)))
    list(controller.run_layer(0, demands(1)))
    list(controller.run_layer(0, demands(0)))
    list(controller.run_layer(0, demands(2)))
    before = len(link.submitted)
    list(controller.run_layer(0, demands(0)))
    assert len(link.submitted) == before
    list(controller.run_layer(0, demands(1)))
    assert len(link.submitted) == before + 1


def test_a_layer_larger_than_the_cache_streams_through_it() -> None:
    controller, link = controller_with(2)
    seen = [expert for expert, *_ in each(controller.run_layer(0, demands(*range(9))))]
    assert sorted(seen) == list(range(9))
    assert max(load.slot for load in link.submitted) <= 1


def test_a_group_does_not_hold_slots_that_misses_wait_for() -> None:
    controller, link = controller_with(3)
    list(controller.run_layer(0, demands(0, 1, 2)))
    assert [len(group) for group in controller.run_layer(0, demands(0, 1, 2))] == [3]
    before = len(link.submitted)
    run = controller.run_layer(0, demands(0, 1, 2, 3))
    seen = [(len(group), len(link.submitted) - before) for group in run]
    assert seen == [(1, 0), (2, 1), (1, 1)]  # the first one's slot is filled while the second computes


def test_a_damaged_expert_raises_and_the_next_request_works() -> None:
    controller, link = controller_with(3, failing=frozenset({ExpertKey(0, 1, 4)}))
    with pytest.raises(LoadError, match="layer 0, expert 1"):
        list(controller.run_layer(0, demands(0, 1, 2)))
    link.failing = frozenset()
    assert sorted(expert for expert, *_ in each(controller.run_layer(0, demands(0, 1, 2)))) == [0, 1, 2]


def test_an_abandoned_run_is_rolled_back() -> None:
    controller, link = controller_with(2)
    run = controller.run_layer(0, demands(0, 1))
    next(run)
    link.roll_back()
    controller.roll_back()
    assert len(controller.cache) + controller.cache.free(0) == 2
    assert sorted(expert for expert, *_ in each(controller.run_layer(1, demands(2, 3)))) == [2, 3]


def test_who_may_have_been_read_over_is_not_taken_for_resident() -> None:
    controller, link = controller_with(1)
    list(controller.run_layer(0, demands(0)))
    controller.prefetch([ExpertKey(1, 7, 4)])  # into the slot of the one that leaves for it as soon as it begins
    assert controller.cache.slot(ExpertKey(0, 0, 4)) is not None
    link.roll_back()
    controller.roll_back()
    assert len(controller.cache) == 0
    assert controller.cache.free(0) == 1


def test_a_prefetch_in_time_is_a_hit_of_its_own_kind() -> None:
    controller, link = controller_with(4)
    controller.prefetch([ExpertKey(1, 7, 4)])
    link.step()
    list(controller.run_layer(1, demands(7)))
    assert controller.counts.misses == 0
    assert controller.counts.prefetched == 1
    list(controller.run_layer(1, demands(7)))
    assert controller.counts.prefetched == 1


def test_a_late_prefetch_is_a_miss_but_not_a_second_load() -> None:
    controller, link = controller_with(4, seed=3)
    link.poll = lambda: None  # type: ignore[method-assign]
    controller.prefetch([ExpertKey(1, 7, 4)])
    link._running.append(link._speculative.pop())  # it has begun
    list(controller.run_layer(1, demands(7)))
    assert controller.counts.misses == 1
    assert len(link.submitted) == 1


def test_a_prefetch_that_is_taken_back_costs_no_resident() -> None:
    """A predictor that names more than is read in time empties no cache and changes no order of leaving."""
    controller, link = controller_with(4)
    for expert in (3, 2, 1, 0):
        list(controller.run_layer(0, demands(expert)))
    link.poll = lambda: link._finished.popleft() if link._finished else None  # type: ignore[method-assign]
    assert controller.prefetch([ExpertKey(1, expert, 4) for expert in range(6)])
    assert len(link._speculative) == 4  # as many as there are slots
    link._running.append(link._speculative.pop(0))  # one has begun
    assert [expert for expert, *_ in each(controller.run_layer(0, demands(0, 1, 2)))] == [0, 1, 2]
    assert (controller.counts.hits, controller.counts.speculative_loads) == (3, 1)
    assert controller.cache.slot(ExpertKey(0, 3, 4)) is None  # its place was taken
    controller.drain()
    assert controller.cache.slot(ExpertKey(1, 0, 4)) is not None
    list(controller.run_layer(0, demands(7)))
    assert controller.cache.slot(ExpertKey(1, 0, 4)) is None  # the oldest of those that are left


def test_another_prediction_takes_the_place_of_what_waited() -> None:
    controller, link = controller_with(4)
    link.poll = lambda: None  # type: ignore[method-assign]
    controller.prefetch([ExpertKey(1, 5, 4), ExpertKey(1, 6, 4)])
    link._running.append(link._speculative.pop(0))  # 5 has begun
    assert controller.prefetch([ExpertKey(1, 7, 4)]), "though a lane reads for no layer"
    assert [load.key.expert for load in link._speculative] == [7]
    assert controller.counts.speculative_loads == 1


def test_who_is_to_leave_for_two_prefetches_leaves_for_one() -> None:
    controller, link = controller_with(2)
    list(controller.run_layer(0, demands(0, 1)))
    controller.prefetch([ExpertKey(1, 5, 4), ExpertKey(1, 6, 4)])
    assert len({load.slot for load in link._speculative}) == 2
    while not link.is_idle():
        link.step()
        controller.collect()
    assert [controller.cache.slot(ExpertKey(1, expert, 4)) is not None for expert in (5, 6)] == [True, True]
    assert len(controller.cache) == 2


def test_prefetches_that_have_not_begun_make_room() -> None:
    controller, _ = controller_with(2)
    controller.prefetch([ExpertKey(1, 5, 4), ExpertKey(1, 6, 4)])
    seen = [expert for expert, *_ in each(controller.run_layer(0, demands(1, 2)))]
    assert sorted(seen) == [1, 2]


def test_wrong_prefetches_in_every_slot_are_waited_for() -> None:
    controller, link = controller_with(3)
    link.poll = lambda: None  # type: ignore[method-assign]
    controller.prefetch([ExpertKey(1, expert, 4) for expert in (5, 6, 7)])
    link._running, link._speculative = link._speculative, []  # all have begun
    assert sorted(expert for expert, *_ in each(controller.run_layer(0, demands(1, 2, 3)))) == [1, 2, 3]


def test_no_prediction_makes_another_leave() -> None:
    controller, link = controller_with(3)
    list(controller.run_layer(1, demands(5, 6, 7)))
    loads = len(link.submitted)
    controller.prefetch([ExpertKey(1, expert, 4) for expert in (1, 6, 2, 7)], protect=True)  # 5 alone may leave
    assert [load.key.expert for load in link.submitted[loads:]] == [1]
    assert controller.cache.slot(ExpertKey(1, 6, 4)) is not None
    assert controller.cache.slot(ExpertKey(1, 7, 4)) is not None


def test_no_prefetch_while_the_link_is_busy() -> None:
    controller, link = controller_with(4)
    link.poll = lambda: None  # type: ignore[method-assign]
    controller.load(ExpertKey(9, 9, 4), urgent=True)
    assert not controller.prefetch([ExpertKey(1, 5, 4)])
    assert len(link.submitted) == 1


def test_a_failed_prefetch_is_asked_for_again() -> None:
    key = ExpertKey(1, 7, 4)
    controller, link = controller_with(4, failing=frozenset({key}))
    controller.prefetch([key])
    link._running.append(link._speculative.pop())
    link.poll = lambda: None  # type: ignore[method-assign]
    original = link.wait

    def heals() -> Finished:
        finished = original()
        link.failing = frozenset()
        return finished

    link.wait = heals  # type: ignore[method-assign]
    assert [expert for expert, *_ in each(controller.run_layer(1, demands(7)))] == [7]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    slots=st.integers(3, 30),
    prefetch=st.booleans(),
    fill=st.booleans(),
    layers=st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=12),
)
def test_every_demand_is_served_from_a_slot_that_holds_it(
    seed: int, slots: int, prefetch: bool, fill: bool, layers: list[set[int]]
) -> None:
    """Invariant 3: while an expert is yielded its slot holds it, whatever arrives and is evicted meanwhile."""
    controller, link = controller_with(slots, seed=seed)
    chance = random.Random(seed)
    everything = [ExpertKey(layer, expert, 4) for layer in range(3) for expert in range(10)]
    told: dict[ExpertKey, int] = {}
    controller.tell_warmed(lambda key, slot: told.update({key: slot}))
    if fill:
        controller.fill(chance.sample(everything, chance.randrange(31)))
    for number, experts in enumerate(layers):
        layer = number % 3
        served = []

        def speculate(after: int = layer) -> None:
            controller.prefetch(ExpertKey((after + 1) % 3, chance.randrange(10), 4) for _ in range(6))

        ahead = speculate if prefetch else None
        for expert, slot, *_ in each(controller.run_layer(layer, demands(*experts), ahead)):
            assert link.contents[slot] == ExpertKey(layer, expert, 4)
            link.step()  # transfers go on while the expert is computed with
            assert link.contents[slot] == ExpertKey(layer, expert, 4)
            served.append(expert)
        assert sorted(served) == sorted(experts)
        if prefetch:
            controller.prefetch(ExpertKey((layer + 1) % 3, chance.randrange(10), 4) for _ in range(4))
        if fill and chance.random() < 0.3:
            controller.fill(chance.sample(everything, 3))
        assert len(controller.cache) <= slots
    controller.drain()
    controller.tell(1000)
    assert link.is_idle()
    assert not link._background + link._running
    assert not controller.filling
    assert controller.counts.warmed >= len(told) >= bool(controller.counts.warmed)
    here = {key: slot for key in everything if (slot := controller.cache.slot(key)) is not None}
    assert all(link.contents[slot] == key for key, slot in here.items())
    assert controller.counts.hits + controller.counts.misses == sum(map(len, layers))


def test_cache_never_evicts_what_is_pinned_or_in_flight() -> None:
    cache = ExpertCache(2, lru(2))
    first, second, third = (ExpertKey(0, expert, 4) for expert in range(3))
    cache.reserve(first)
    cache.arrived(first)
    cache.pin(first)
    assert cache.reserve(second) is not None
    assert cache.reserve(third) is None
    cache.arrived(second)
    assert cache.reserve(third) is not None
    assert cache.slot(first) is not None
    assert cache.slot(second) is None


def test_pins_count() -> None:
    cache = ExpertCache(1, lru(1))
    key = ExpertKey(0, 0, 4)
    cache.reserve(key)
    cache.arrived(key)
    cache.pin(key)
    cache.pin(key)
    cache.unpin(key)
    assert cache.reserve(ExpertKey(0, 1, 4)) is None
    cache.unpin(key)
    assert cache.reserve(ExpertKey(0, 1, 4)) == 0


def test_a_cache_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        ExpertCache(0, lru(0))
