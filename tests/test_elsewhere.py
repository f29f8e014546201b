"""Which missing experts are computed elsewhere (HOBBIT, section 4): the controller, the scheduler, the composition."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_link import controller_with, demands
from groups import each
from schedules import HOBBIT, Said, keys, run, scheduler_with
from tiermoe.decide.controller import ELSEWHERE
from tiermoe.decide.misses import MissCosts, averaged, computed_elsewhere
from tiermoe.errors import ConfigError
from tiermoe.systems import compose
from tiermoe.types import Demand, ExpertKey, Ready, Routed


def every(misses: int) -> int:
    return misses


def test_misses_go_elsewhere_first_and_are_not_loaded() -> None:
    controller, link = controller_with(4)
    list(controller.run_layer(0, demands(5, 2)))
    before = len(link.submitted)
    ready = list(each(controller.run_layer(0, [Demand(7, 1, 4), *demands(5, 2), Demand(8, 3, 4)], elsewhere=every)))
    assert ready[:2] == [Ready(8, ELSEWHERE, 4), Ready(7, ELSEWHERE, 4)]
    assert {(one.expert, link.contents[one.slot].expert) for one in ready[2:]} == {(5, 5), (2, 2)}
    counts = controller.counts
    assert (len(link.submitted), counts.loads) == (before, before)
    assert (counts.hits, counts.misses, counts.elsewhere) == (2, 4, 2)


def test_what_is_on_its_way_is_waited_for_and_what_no_token_needs_is_loaded() -> None:
    controller, link = controller_with(4)
    link.poll = lambda: None  # type: ignore[method-assign]
    controller.prefetch([ExpertKey(0, 7, 4)])
    link._running.append(link._speculative.pop())  # it has begun
    ready = list(each(controller.run_layer(0, [*demands(7), Demand(3, 0, 4), Demand(4, 1, 0)], elsewhere=every)))
    assert {(one.expert, link.contents[one.slot].expert) for one in ready} == {(7, 7), (3, 3)}
    counts = controller.counts
    assert (counts.misses, counts.elsewhere, counts.skipped, counts.loads) == (1, 0, 1, 1)


def test_misses_go_elsewhere_before_loads_are_waited_for() -> None:
    controller, link = controller_with(4)
    link.wait = lambda: pytest.fail("waited for a load first")  # type: ignore[method-assign]
    steps = each(controller.run_layer(0, [Demand(1, 0, 4), *demands(2)], together=True, elsewhere=every))
    assert next(steps) == Ready(2, ELSEWHERE, 4)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    slots=st.integers(2, 12),
    layers=st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=12),
)
def test_every_demand_comes_once_from_its_slot_or_from_elsewhere(seed: int, slots: int, layers: list[set[int]]) -> None:
    controller, link = controller_with(slots, seed=seed)
    chance = random.Random(seed)
    for number, experts in enumerate(layers):
        layer, served = number % 3, []
        for expert, slot, *_ in each(controller.run_layer(layer, demands(*experts), elsewhere=every)):
            link.step()
            assert slot == ELSEWHERE or link.contents[slot] == ExpertKey(layer, expert, 4)
            served.append(expert)
        assert sorted(served) == sorted(experts)
        controller.prefetch(ExpertKey((layer + 1) % 3, chance.randrange(10), 4) for _ in range(4))
    controller.drain()
    assert not any(one.urgent for one in link.submitted)
    counts = controller.counts
    assert counts.hits + counts.misses == sum(map(len, layers))
    assert counts.elsewhere <= counts.misses


def test_prefill_loads_and_decode_does_not() -> None:
    scheduler, link = scheduler_with("lru", misses="cpu")
    scheduler.begin_pass(2, Said(), "prefill")
    list(scheduler.run_layer(Routed(0, "prefill", [[0, 1], [1, 2]], [[]]), Said()))
    assert [each.expert for each in keys(link, urgent=True)] == [1, 0, 2]  # by falling number of tokens
    scheduler.begin_pass(1, Said(), "decode")
    assert [one.slot == ELSEWHERE for one in run(scheduler, 0, [1, 3], [0.5, 0.5])] == [False, True]
    assert len(link.submitted) == 3


def test_hobbit_asks_elsewhere_in_the_precision_that_a_load_would_have() -> None:
    scheduler, link = scheduler_with("hobbit", bits=(4, 2), **HOBBIT, misses="cpu")
    scheduler.begin_pass(1, Said(), "decode")
    assert run(scheduler, 0, [3, 1, 2], [0.65, 0.3, 0.05]) == [Ready(1, ELSEWHERE, 2), Ready(3, ELSEWHERE, 4)]
    assert scheduler.controller.counts.skipped == 1
    assert link.submitted == []


def test_prefetches_fill_even_a_cache_with_room_for_all() -> None:
    scheduler, link = scheduler_with("mixtral-offload", slots=12, misses="cpu")
    scheduler.begin_pass(1, Said(), "decode")
    run(scheduler, 0, [0, 1], [0.5, 0.5], Said({1: [(2, 0.7), (3, 0.3)]}))
    assert keys(link, urgent=False) == [ExpertKey(1, 2, 4), ExpertKey(1, 3, 4)]


def test_it_counts_as_lossy_and_exact_takes_it_out() -> None:
    changed = compose("lru", {"misses": "cpu"})
    assert changed.lossy == ["misses=cpu"]
    assert changed.exact() == compose("lru")


def test_of_some_misses_those_of_the_fewest_tokens_go_elsewhere() -> None:
    controller, link = controller_with(4)
    wanted = [Demand(1, 2, 4), Demand(2, 1, 4), Demand(3, 5, 4), Demand(4, 0, 4)]
    ready = list(each(controller.run_layer(0, wanted, elsewhere=lambda misses: misses - 1)))
    assert ready[:2] == [Ready(1, ELSEWHERE, 4), Ready(2, ELSEWHERE, 4)]
    assert [load.key.expert for load in link.submitted] == [3, 4]
    assert (controller.counts.misses, controller.counts.elsewhere, controller.counts.loads) == (3, 2, 2)


@given(misses=st.integers(0, 12), load=st.floats(1e-6, 1), elsewhere=st.floats(1e-6, 1))
def test_both_ways_end_soonest(misses: int, load: float, elsewhere: float) -> None:
    def lasts(away: int) -> float:
        return max((misses - away) * load, away * elsewhere)

    chosen = computed_elsewhere(misses, MissCosts(load, elsewhere))
    assert 0 <= chosen <= misses
    assert all(lasts(chosen) <= lasts(away) for away in range(misses + 1))


@pytest.mark.parametrize(
    ("costs", "expected"),
    [((1.0, None), [0, 1, 1]), ((None, 1.0), [0, 0, 2]), ((None, None), [0, 1, 1]), ((3.0, 1.0), [0, 1, 2])],
)
def test_what_was_not_measured_is_tried_once(costs: tuple[float | None, float | None], expected: list[int]) -> None:
    assert [computed_elsewhere(misses, MissCosts(*costs)) for misses in (0, 1, 3)] == expected


def test_averages_forget() -> None:
    average = averaged(None, 2.0)
    for _ in range(100):
        average = averaged(average, 1.0)
    assert 1.0 <= average < 1.001


@pytest.mark.parametrize(("costs", "away"), [((1.0, 0.4), 3), ((0.1, 5.0), 0)])
def test_the_measured_way_asks_what_both_have_taken(costs: tuple[float, float], away: int) -> None:
    scheduler, link = scheduler_with("lru", slots=12, misses="measured", miss_costs=lambda: MissCosts(*costs))
    scheduler.begin_pass(1, Said(), "prefill")
    list(scheduler.run_layer(Routed(0, "prefill", [[0, 1]], [[0.5, 0.5]]), Said()))
    assert len(link.submitted) == 2  # a prefill loads
    scheduler.begin_pass(1, Said(), "decode")
    ready = run(scheduler, 1, [0, 1, 2, 3], [0.25] * 4)
    assert [one.slot == ELSEWHERE for one in ready].count(True) == away


def test_without_measurements_the_measured_way_is_refused() -> None:
    with pytest.raises(ConfigError, match="use --set misses=load"):
        scheduler_with("lru", misses="measured")
