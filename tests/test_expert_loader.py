"""The expert loader over a link that may fail: urgent loads, loads ahead, background loads, misses on the CPU."""

from __future__ import annotations

import queue
import random
import threading
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from extent_files import EXPERTS, SIZE, bytes_of, filler, write_experts
from fake_link import (
    HOBBIT,
    FakeLink,
    Said,
    controller_with,
    demands,
    each,
    keys,
    lru,
    lru_of,
    one_pool,
    pools,
    run,
    scheduler_with,
)
from gpu_rig import Rig
from tiermoe.errors import ConfigError, LoadError
from tiermoe.lab.simulate.link import Move, VirtualClock, VirtualLink
from tiermoe.offload.assembly import ModelShape, PrecisionSlots, assemble
from tiermoe.offload.cache import ExpertCache
from tiermoe.offload.composition import NO_CACHE
from tiermoe.offload.disk import DiskLink
from tiermoe.offload.io_threads import IOThreads
from tiermoe.offload.link import Finished
from tiermoe.offload.loader import CPU_FALLBACK, ExpertLoader
from tiermoe.offload.policies.allotment import Pool
from tiermoe.offload.policies.routing import MissCosts, averaged
from tiermoe.offload.presets import PRESETS, compose
from tiermoe.offload.profiles import Tables
from tiermoe.offload.slots import HostSlots
from tiermoe.types import Demand, ExpertKey, Extent, Load, Ready, Routed


def key(layer: int, expert: int) -> ExpertKey:
    return ExpertKey(layer, expert, 4)


def every(misses: int) -> int:
    return misses


def arrive(controller: ExpertLoader, link: FakeLink) -> None:
    while controller.filling:
        link.step()
        controller.collect()


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    slots=st.integers(2, 30),
    prefetch=st.booleans(),
    fill=st.booleans(),
    on_cpu=st.booleans(),
    layers=st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=12),
)
def test_every_demand_is_served_from_a_slot_that_holds_it(
    seed: int, slots: int, prefetch: bool, fill: bool, on_cpu: bool, layers: list[set[int]]
) -> None:
    """Invariant 3: while an expert is yielded its slot holds it, whatever arrives and is evicted meanwhile. on_cpu:
    misses are computed on the CPU."""
    controller, link = controller_with(slots, seed=seed)
    chance = random.Random(seed)
    everything = [key(layer, expert) for layer in range(3) for expert in range(10)]
    told: dict[ExpertKey, int] = {}
    controller.listen(lambda key, slot: told.update({key: slot}))
    if fill:
        controller.fill(chance.sample(everything, chance.randrange(31)))
    for number, experts in enumerate(layers):
        layer = number % 3
        served = []

        def speculate(after: int = layer) -> None:
            controller.prefetch(key((after + 1) % 3, chance.randrange(10)) for _ in range(6))

        ahead = speculate if prefetch else None
        run = controller.run_layer(layer, demands(*experts), ahead, cpu_fallback=every if on_cpu else None)
        for expert, slot, *_ in each(run):
            assert slot == CPU_FALLBACK or link.contents[slot] == key(layer, expert)
            link.step()  # transfers go on while the expert is computed with
            assert slot == CPU_FALLBACK or link.contents[slot] == key(layer, expert)
            served.append(expert)
        assert sorted(served) == sorted(experts)
        if prefetch:
            controller.prefetch(key((layer + 1) % 3, chance.randrange(10)) for _ in range(4))
        if fill and chance.random() < 0.3:
            controller.fill(chance.sample(everything, 3))
        assert len(controller.cache) <= slots
    controller.drain()
    controller.report_warmed(1000)
    counts = controller.counts
    assert not controller.cache.in_flight
    assert not link.background + link.running
    assert not controller.filling
    assert counts.warmed >= len(told) >= bool(counts.warmed)
    here = {one: slot for one in everything if (slot := controller.cache.slot(one)) is not None}
    assert all(link.contents[slot] == one for one, slot in here.items())
    assert counts.hits + counts.misses == sum(map(len, layers))
    assert counts.loads + counts.cpu_fallback <= counts.misses
    assert sum(load.urgent for load in link.submitted) == counts.loads
    assert not (on_cpu and counts.loads)


def test_a_cache_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        one_pool(0, lru(0))


@pytest.mark.parametrize("begin", ["prefetch", "fill"])
def test_what_has_begun_to_no_use_is_waited_for_and_what_failed_is_asked_for_again(begin: str) -> None:
    """Both slots are full of loads that have begun, and one of them fails, which a layer needs then."""
    controller, link = controller_with(2, failing=frozenset({key(0, 7)}))
    link.poll = lambda: None  # type: ignore[method-assign]
    getattr(controller, begin)([key(0, 7), key(1, 6)])
    link.running, link.speculative, link.background = link.speculative + link.background, [], []
    original = link.wait

    def heals() -> Finished:
        finished = original()
        if finished.error is not None:
            link.failing = frozenset()
        return finished

    link.wait = heals  # type: ignore[method-assign]
    assert sorted(one.expert for one in each(controller.run_layer(0, demands(1, 2, 7)))) == [1, 2, 7]
    assert controller.counts.misses == 3


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


def test_a_group_does_not_hold_slots_that_misses_wait_for() -> None:
    controller, link = controller_with(3)
    list(controller.run_layer(0, demands(0, 1, 2)))
    assert [len(group) for group in controller.run_layer(0, demands(0, 1, 2))] == [3]
    before = len(link.submitted)
    run = controller.run_layer(0, demands(0, 1, 2, 3))
    seen = [(len(group), len(link.submitted) - before) for group in run]
    assert seen == [(1, 0), (2, 1), (1, 1)]  # the first one's slot is filled while the second computes


def test_a_damaged_expert_raises_and_the_next_request_works() -> None:
    controller, link = controller_with(3, failing=frozenset({key(0, 1)}))
    with pytest.raises(LoadError, match="layer 0, expert 1"):
        list(controller.run_layer(0, demands(0, 1, 2)))
    link.failing = frozenset()
    assert sorted(expert for expert, *_ in each(controller.run_layer(0, demands(0, 1, 2)))) == [0, 1, 2]


def test_who_may_have_been_read_over_is_not_taken_for_resident() -> None:
    controller, link = controller_with(1)
    list(controller.run_layer(0, demands(0)))
    controller.prefetch([key(1, 7)])  # into the slot of the one that leaves for it as soon as it begins
    assert controller.cache.slot(key(0, 0)) is not None
    link.roll_back()
    controller.roll_back()
    assert len(controller.cache) == 0
    assert controller.cache.free(0) == 1


def test_a_prefetch_in_time_is_a_hit_of_its_own_kind() -> None:
    controller, link = controller_with(4)
    controller.prefetch([key(1, 7)])
    link.step()
    list(controller.run_layer(1, demands(7)))
    assert controller.counts.misses == 0
    assert controller.counts.prefetched == 1
    list(controller.run_layer(1, demands(7)))
    assert controller.counts.prefetched == 1


def test_a_late_prefetch_is_a_miss_but_not_a_second_load() -> None:
    controller, link = controller_with(4, seed=3)
    link.poll = lambda: None  # type: ignore[method-assign]
    controller.prefetch([key(1, 7)])
    link.running.append(link.speculative.pop())  # it has begun
    list(controller.run_layer(1, demands(7)))
    assert controller.counts.misses == 1
    assert len(link.submitted) == 1


def test_a_prefetch_that_is_taken_back_costs_no_resident() -> None:
    """A predictor that names more than is read in time empties no cache and changes no order of leaving."""
    controller, link = controller_with(4)
    for expert in (3, 2, 1, 0):
        list(controller.run_layer(0, demands(expert)))
    link.poll = lambda: link.finished.popleft() if link.finished else None  # type: ignore[method-assign]
    assert controller.prefetch([key(1, expert) for expert in range(6)])
    assert len(link.speculative) == 4  # as many as there are slots
    link.running.append(link.speculative.pop(0))  # one has begun
    assert [expert for expert, *_ in each(controller.run_layer(0, demands(0, 1, 2)))] == [0, 1, 2]
    assert (controller.counts.hits, controller.counts.speculative_loads) == (3, 1)
    assert controller.cache.slot(key(0, 3)) is None  # its place was taken
    controller.drain()
    assert controller.cache.slot(key(1, 0)) is not None
    list(controller.run_layer(0, demands(7)))
    assert controller.cache.slot(key(1, 0)) is None  # the oldest of those that are left


def test_another_prediction_takes_the_place_of_what_waited() -> None:
    controller, link = controller_with(4)
    link.poll = lambda: None  # type: ignore[method-assign]
    controller.prefetch([key(1, 5), key(1, 6)])
    link.running.append(link.speculative.pop(0))  # 5 has begun
    assert controller.prefetch([key(1, 7)]), "though a lane reads for no layer"
    assert [load.key.expert for load in link.speculative] == [7]
    assert controller.counts.speculative_loads == 1


def test_who_is_to_leave_for_two_prefetches_leaves_for_one() -> None:
    controller, link = controller_with(2)
    list(controller.run_layer(0, demands(0, 1)))
    controller.prefetch([key(1, 5), key(1, 6)])
    assert len({load.slot for load in link.speculative}) == 2
    while controller.cache.in_flight:
        link.step()
        controller.collect()
    assert [controller.cache.slot(key(1, expert)) is not None for expert in (5, 6)] == [True, True]
    assert len(controller.cache) == 2


def test_no_prediction_makes_another_leave() -> None:
    controller, link = controller_with(3)
    list(controller.run_layer(1, demands(5, 6, 7)))
    loads = len(link.submitted)
    controller.prefetch([key(1, expert) for expert in (1, 6, 2, 7)], protect=True)  # 5 alone may leave
    assert [load.key.expert for load in link.submitted[loads:]] == [1]
    assert controller.cache.slot(key(1, 6)) is not None
    assert controller.cache.slot(key(1, 7)) is not None


def test_no_prefetch_while_the_link_is_busy() -> None:
    controller, link = controller_with(4)
    link.poll = lambda: None  # type: ignore[method-assign]
    controller.run_layer(9, demands(9))
    assert not controller.prefetch([key(1, 5)])
    assert len(link.submitted) == 1


def test_misses_go_elsewhere_first_and_are_not_loaded() -> None:
    controller, link = controller_with(4)
    list(controller.run_layer(0, demands(5, 2)))
    before = len(link.submitted)
    ready = list(each(controller.run_layer(0, [Demand(7, 1, 4), *demands(5, 2), Demand(8, 3, 4)], cpu_fallback=every)))
    assert ready[:2] == [Ready(8, CPU_FALLBACK, 4), Ready(7, CPU_FALLBACK, 4)]
    assert {(one.expert, link.contents[one.slot].expert) for one in ready[2:]} == {(5, 5), (2, 2)}
    counts = controller.counts
    assert (len(link.submitted), counts.loads) == (before, before)
    assert (counts.hits, counts.misses, counts.cpu_fallback) == (2, 4, 2)


def test_hobbit_asks_elsewhere_in_the_precision_that_a_load_would_have() -> None:
    scheduler, link = scheduler_with("hobbit", bits=(4, 2), **HOBBIT, misses="cpu")
    scheduler.begin_pass(1, Said(), "decode")
    assert run(scheduler, 0, [3, 1, 2], [0.65, 0.3, 0.05]) == [Ready(1, CPU_FALLBACK, 2), Ready(3, CPU_FALLBACK, 4)]
    assert scheduler.loader.counts.skipped == 1
    assert link.submitted == []


def test_what_is_on_its_way_is_waited_for_and_what_no_token_needs_is_loaded() -> None:
    controller, link = controller_with(4)
    link.poll = lambda: None  # type: ignore[method-assign]
    controller.prefetch([key(0, 7)])
    link.running.append(link.speculative.pop())  # it has begun
    wanted = [*demands(7, 9), Demand(3, 0, 4), Demand(4, 1, 0)]
    steps = each(controller.run_layer(0, wanted, together=True, cpu_fallback=every))
    wait, link.wait = link.wait, lambda: pytest.fail("waited for a load first")  # type: ignore[method-assign]
    assert next(steps) == Ready(9, CPU_FALLBACK, 4)
    link.wait = wait  # type: ignore[method-assign]
    assert {(one.expert, link.contents[one.slot].expert) for one in steps} == {(7, 7), (3, 3)}
    counts = controller.counts
    assert (counts.misses, counts.cpu_fallback, counts.skipped, counts.loads) == (2, 1, 1, 1)


def test_of_some_misses_those_of_the_fewest_tokens_go_elsewhere() -> None:
    controller, link = controller_with(4)
    wanted = [Demand(1, 2, 4), Demand(2, 1, 4), Demand(3, 5, 4), Demand(4, 0, 4)]
    ready = list(each(controller.run_layer(0, wanted, cpu_fallback=lambda misses: misses - 1)))
    assert ready[:2] == [Ready(1, CPU_FALLBACK, 4), Ready(2, CPU_FALLBACK, 4)]
    assert [load.key.expert for load in link.submitted] == [3, 4]
    assert (controller.counts.misses, controller.counts.cpu_fallback, controller.counts.loads) == (3, 2, 2)


@pytest.mark.parametrize(
    ("costs", "away"),
    [((1.0, 0.4), 3), ((0.1, 5.0), 0), ((3.0, 1.0), 3), ((1.0, 1.0), 2), ((1.0, None), 1), ((None, 1.0), 3)],
)
def test_the_measured_way_ends_soonest_and_tries_once_what_was_not_measured(
    costs: tuple[float | None, float | None], away: int
) -> None:
    scheduler, link = scheduler_with("lru", slots=12, misses="measured", miss_costs=lambda: MissCosts(*costs))
    scheduler.begin_pass(1, Said(), "prefill")
    list(scheduler.run_layer(Routed(0, "prefill", [[0, 1]], [[0.5, 0.5]]), Said()))
    assert len(link.submitted) == 2  # a prefill loads
    scheduler.begin_pass(1, Said(), "decode")
    ready = run(scheduler, 1, [0, 1, 2, 3], [0.25] * 4)
    assert [one.slot == CPU_FALLBACK for one in ready].count(True) == away
    with pytest.raises(ConfigError, match="use --set misses=load"):
        scheduler_with("lru", misses="measured")


def test_prefetches_fill_even_a_cache_with_room_for_all() -> None:
    scheduler, link = scheduler_with("mixtral-offload", slots=12, misses="cpu")
    scheduler.begin_pass(1, Said(), "decode")
    run(scheduler, 0, [0, 1], [0.5, 0.5], Said({1: [(2, 0.7), (3, 0.3)]}))
    assert keys(link, urgent=False) == [key(1, 2), key(1, 3)]


def test_averages_forget() -> None:
    average = averaged(None, 2.0)
    for _ in range(100):
        average = averaged(average, 1.0)
    assert 1.0 <= average < 1.001


@pytest.mark.parametrize("taken", [[], [key(1, 9)]], ids=["all free", "one taken"])
def test_each_pool_takes_what_it_has_slots_for(taken: list[ExpertKey]) -> None:
    cache = ExpertCache([Pool(1, None, range(1)), Pool(2, None, range(1, 2))], lru_of, (4,))
    for one in taken:
        cache.reserve(one)
    ExpertLoader(cache, link := FakeLink()).fill([key(0, 3), key(0, 1), key(1, 5), key(1, 2), key(1, 7)])
    assert [load.key for load in link.submitted] == [key(0, 3), key(1, 5), key(1, 2)][: 3 - len(taken)]


# background loads


def test_it_is_read_layer_by_layer_into_free_slots_alone() -> None:
    controller, link = controller_with(4)
    list(controller.run_layer(2, demands(9)))
    controller.fill([key(1, 5), key(0, 3), key(2, 9), key(0, 4), key(1, 6)])
    assert [load.key for load in link.submitted[1:]] == [key(0, 3), key(0, 4), key(1, 5)]
    assert all(load.background and not load.urgent for load in link.submitted[1:])
    arrive(controller, link)
    assert controller.cache.slot(key(2, 9)) is not None
    assert (controller.counts.warmed, controller.counts.loads, controller.counts.speculative_loads) == (3, 1, 0)
    assert sorted(expert for expert, *_ in each(controller.run_layer(0, demands(3, 4)))) == [3, 4]
    assert (controller.counts.hits, controller.counts.misses) == (2, 1)


def test_what_has_come_is_told_a_few_at_a_time() -> None:
    controller, link = controller_with(4)
    told: list[tuple[ExpertKey, int]] = []
    controller.listen(lambda key, slot: told.append((key, slot)))
    controller.fill([key(0, 2), key(0, 3), key(0, 1)])
    arrive(controller, link)
    assert told == []
    controller.report_warmed(2)
    assert len(told) == 2
    controller.report_warmed(2)
    assert sorted(one for one, _ in told) == [key(0, 1), key(0, 2), key(0, 3)]
    assert all(controller.cache.slot(one) == slot for one, slot in told)


def test_what_a_layer_asks_for_is_taken_back_and_read_at_once() -> None:
    controller, link = controller_with(4)
    controller.fill([key(0, expert) for expert in range(4)])
    run = each(controller.run_layer(0, demands(3)))
    assert next(run).expert == 3
    assert link.submitted[-1].urgent
    assert [load.key.expert for load in link.background] == [0, 1, 2]
    list(run)
    assert (controller.counts.misses, controller.counts.loads) == (1, 1)


def test_what_has_begun_is_waited_for_and_not_read_twice() -> None:
    controller, link = controller_with(4)
    link.poll = lambda: None  # type: ignore[method-assign]
    controller.fill([key(0, 1), key(0, 2)])
    link.running.append(link.background.pop(0))
    assert [expert for expert, *_ in each(controller.run_layer(0, demands(1)))] == [1]
    assert len(link.submitted) == 2
    assert (controller.counts.misses, controller.counts.loads, controller.counts.warmed) == (1, 0, 1)


def test_a_slot_is_taken_from_the_least_wanted_before_anything_leaves() -> None:
    controller, link = controller_with(3)
    list(controller.run_layer(0, demands(7)))
    controller.fill([key(1, 5), key(0, 6)])
    list(controller.run_layer(0, demands(1)))
    assert [load.key for load in link.background] == [key(1, 5)]
    assert controller.cache.slot(key(0, 7)) is not None


def test_who_was_used_least_leaves_first() -> None:
    controller, link = controller_with(3)
    controller.fill([key(0, 1), key(1, 2), key(0, 3)])
    arrive(controller, link)
    list(controller.run_layer(2, demands(8)))
    assert controller.cache.slot(key(0, 3)) is None
    list(controller.run_layer(2, demands(9)))
    assert controller.cache.slot(key(1, 2)) is None
    assert controller.cache.slot(key(0, 1)) is not None


def test_a_prediction_goes_before_the_background() -> None:
    controller, link = controller_with(3)
    controller.fill([key(0, 1), key(0, 2), key(0, 3)])
    controller.prefetch([key(0, 2), key(1, 5)])
    assert [load.key for load in link.speculative] == [key(0, 2), key(1, 5)]
    assert [load.key for load in link.background] == [key(0, 1)]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_only_where_no_token_depends_on_what_is_there(name: str) -> None:
    changes = {"t1": 0.6, "t2": 0.9, "weights": "0.25,0.25,0.25,0.25", "window": 2, "boundary": 1, "theta": 0.1}
    changes |= {"low_popularity": 0.2, "layer_recall": (0.5,) * 3, "layer_uses": (2.0,) * 3}
    preset = PRESETS[name]
    made = {part: changes[part] for part in preset.missing()}
    composition = compose(name, made | ({"prefetch": "none"} if preset.prefetch == "path" else {}))
    slots = [PrecisionSlots((4,), 12)]
    if composition.low_share:
        slots = [PrecisionSlots((4,), 12), PrecisionSlots((2,), 4)]
    found = Tables({(0, 0): 4}, {(0, 0): 1.0})
    shape, costs = ModelShape([4, 4, 4], [2, 2, 2]), MissCosts(None, None)
    scheduler = assemble(composition, shape, slots, link := FakeLink(), 4, found, miss_costs=lambda: costs)
    scheduler.fill([])
    static = composition.cache in ("last-layers", "most-frequent")  # what is here is given
    assert bool(link.submitted) is (static or (not composition.lossy and composition.cache not in NO_CACHE))


def test_not_all_fit_and_nothing_is_known_nothing_is_read() -> None:
    shape = ModelShape([4, 4, 4], [2, 2, 2])
    scheduler = assemble(compose("default"), shape, [PrecisionSlots((4,), 6)], link := FakeLink(), 4)
    scheduler.fill([])
    assert link.submitted == []
    scheduler.fill([[0, 9, 1, 5], [1, 2, 3, 4], [0, 0, 0, 3]])
    expected = [key(0, 1), key(0, 3), key(1, 3), key(1, 2), key(2, 3)]  # two slots a layer
    assert [load.key for load in link.submitted] == expected


# links


def test_lanes_take_the_background_last_and_keep_one_lane_free() -> None:
    begun: queue.SimpleQueue[int] = queue.SimpleQueue()
    go_on = threading.Semaphore(0)

    def work(load: Load) -> None:
        begun.put(load.key.expert)
        go_on.acquire()

    lanes = IOThreads(2, work)
    for expert in range(3):
        lanes.submit(Load(key(0, expert), expert, urgent=False, background=True))
    assert begun.get() == 0
    lanes.submit(Load(key(0, 3), 3, urgent=False))
    assert begun.get() == 3  # by the lane that was kept free
    lanes.submit(Load(key(0, 4), 4, urgent=False))
    lanes.submit(Load(key(0, 5), 5, urgent=True))
    assert [load.key.expert for load in lanes.recall()] == [4]
    go_on.release()
    assert begun.get() == 5
    assert lanes.withdraw(key(0, 0)) is None  # it has begun
    assert lanes.withdraw(key(0, 2)) is not None
    assert lanes.withdraw(key(0, 2)) is None
    go_on.release(4)
    assert begun.get() == 1
    lanes.close()


def test_a_link_is_closed_while_it_fills(tmp_path: Path) -> None:
    extents = write_experts(tmp_path / "experts")
    link = DiskLink(filler(extents), HostSlots(EXPERTS, SIZE), 2)
    ExpertLoader(pools(EXPERTS, (16,)), link).fill(ExpertKey(0, expert, 16) for expert in range(EXPERTS))
    link.close()


@pytest.mark.parametrize("seed", range(8))
def test_disk_lanes_serve_layers_from_slots_that_hold_them_while_they_fill(tmp_path: Path, seed: int) -> None:
    """Real threads: whatever the background has reached, a layer computes with what it asked for."""
    path, chance = tmp_path / "experts", random.Random(seed)
    extents = write_experts(path)
    if seed % 3 == 0:
        broken = chance.randrange(EXPERTS)
        extents[broken] = Extent(extents[broken].segments, xxhash.xxh3_64_hexdigest(b"another"))
    else:
        broken = -1
    count = chance.choice([4, 9, EXPERTS])
    slots = HostSlots(count, SIZE)
    link = DiskLink(filler(extents), slots, chance.choice([1, 2, 3]))
    controller = ExpertLoader(pools(count, (16,)), link)
    controller.fill(ExpertKey(0, expert, 16) for expert in chance.sample(range(EXPERTS), EXPERTS))
    for _ in range(20):
        chosen = [expert for expert in chance.sample(range(EXPERTS), 4) if expert != broken]
        served = []
        for ready in each(controller.run_layer(0, [Demand(expert, 1, 16) for expert in chosen])):
            held = slots.buffer(ready.slot)[:SIZE].numpy().tobytes()
            assert held == bytes_of(path, extents[ready.expert])
            served.append(ready.expert)
        assert sorted(served) == sorted(chosen)
    controller.drain()
    assert not controller.filling
    link.close()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), lanes=st.integers(1, 3), slots=st.integers(6, 24))
def test_gpu_slots_fill_too_and_none_is_overwritten_in_use(seed: int, lanes: int, slots: int) -> None:
    rig, chance = Rig(slots, 4, lanes, seed), random.Random(seed)
    rig.controller.fill(key(layer, expert) for layer in range(4) for expert in range(6))
    for number in range(6):
        rig.layer(number % 4, chance.sample(range(6), 3))
    rig.end()


def test_the_virtual_link_serves_the_background_last() -> None:
    clock = VirtualClock()
    link = VirtualLink(clock, 100.0, lambda _: Move(100))
    link.submit(Load(key(0, 0), 0, urgent=False, background=True))
    link.submit(Load(key(0, 1), 1, urgent=False, background=True))
    link.submit(Load(key(0, 2), 2, urgent=False, background=True))
    link.submit(Load(key(0, 3), 3, urgent=True))
    assert [link.wait().load.key.expert for _ in range(2)] == [0, 3]  # the first had begun
    assert link.withdraw(key(0, 2))
    assert not link.withdraw(key(0, 1))
    assert link.wait().load.key.expert == 1
    assert clock.now == 3.0
