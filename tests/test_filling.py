"""Reading in the background: which experts come into free slots, and that nobody waits for them or loses a slot."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from caches import lru_of, pools
from extent_files import EXPERTS, SIZE, bytes_of, filler, write_experts
from fake_link import FakeLink, controller_with, demands
from gpu_rig import Rig
from groups import each
from tiermoe.decide.allotment import Pool
from tiermoe.decide.compose import ModelShape, PrecisionSlots, Tables, assemble
from tiermoe.decide.controller import Controller
from tiermoe.decide.filling import WINDOW, Uses, merged, most_used, that_fit
from tiermoe.decide.pools import Pools
from tiermoe.simulate.link import VirtualClock, VirtualLink
from tiermoe.systems import PRESETS, compose
from tiermoe.tiers.disk import DiskLink
from tiermoe.tiers.lanes import Lanes
from tiermoe.tiers.slots import HostSlots
from tiermoe.types import Demand, ExpertKey, Extent, Load


def key(layer: int, expert: int) -> ExpertKey:
    return ExpertKey(layer, expert, 4)


def arrive(controller: Controller, link: FakeLink) -> None:
    while controller.filling:
        link.step()
        controller.collect()


# the plan


def test_the_most_used_come_first_and_unused_ones_only_where_all_fit() -> None:
    uses = [[0.0, 5.0, 1.0], [7.0, 5.0, 0.0]]
    used = [key(1, 0), key(0, 1), key(1, 1), key(0, 2)]
    assert most_used([3, 3], 4, uses, everything=False) == used
    assert most_used([3, 3], 4, uses, everything=True) == [*used, key(0, 0), key(1, 2)]
    assert most_used([2, 1], 4, [], everything=True) == [key(0, 0), key(0, 1), key(1, 0)]
    assert most_used([2, 1], 4, [], everything=False) == []


def test_each_pool_takes_what_it_has_slots_for() -> None:
    cache = Pools([Pool(1, None, range(1)), Pool(2, None, range(1, 2))], lru_of, (4,))
    wanted = [key(0, 3), key(0, 1), key(1, 5), key(1, 2), key(1, 7)]
    assert that_fit(cache, wanted) == [key(0, 3), key(1, 5), key(1, 2)]
    cache.reserve(key(1, 9))
    assert that_fit(cache, wanted) == [key(0, 3), key(1, 5)]


def test_uses_fade_as_others_are_counted() -> None:
    uses = Uses([2, 1])
    uses.note(0, [Demand(1, 3, 4), Demand(0, 1, 4)])
    uses.note(0, [Demand(1, 2, 4)])
    assert uses.counts == [[1, 5], [0]]
    assert merged([], uses.counts) == [[1, 5], [0]]
    assert merged([[8, 0], [4]], uses.counts) == [[pytest.approx(8 * (1 - 6 / WINDOW) + 1), 5], [4]]
    assert merged([[8.0]], [[2 * WINDOW]]) == [[2 * WINDOW]]


# the controller


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
    controller.tell_warmed(lambda key, slot: told.append((key, slot)))
    controller.fill([key(0, 2), key(0, 3), key(0, 1)])
    arrive(controller, link)
    assert told == []
    controller.tell(2)
    assert len(told) == 2
    controller.tell(2)
    assert sorted(one for one, _ in told) == [key(0, 1), key(0, 2), key(0, 3)]
    assert all(controller.cache.slot(one) == slot for one, slot in told)


def test_what_a_layer_asks_for_is_taken_back_and_read_at_once() -> None:
    controller, link = controller_with(4)
    controller.fill([key(0, expert) for expert in range(4)])
    run = each(controller.run_layer(0, demands(3)))
    assert next(run).expert == 3
    assert link.submitted[-1].urgent
    assert [load.key.expert for load in link._background] == [0, 1, 2]
    list(run)
    assert (controller.counts.misses, controller.counts.loads) == (1, 1)


def test_what_has_begun_is_waited_for_and_not_read_twice() -> None:
    controller, link = controller_with(4)
    link.poll = lambda: None  # type: ignore[method-assign]
    controller.fill([key(0, 1), key(0, 2)])
    link._running.append(link._background.pop(0))
    assert [expert for expert, *_ in each(controller.run_layer(0, demands(1)))] == [1]
    assert len(link.submitted) == 2
    assert (controller.counts.misses, controller.counts.loads, controller.counts.warmed) == (1, 0, 1)


def test_a_slot_is_taken_from_the_least_wanted_before_anything_leaves() -> None:
    controller, link = controller_with(3)
    list(controller.run_layer(0, demands(7)))
    controller.fill([key(1, 5), key(0, 6)])
    list(controller.run_layer(0, demands(1)))
    assert [load.key for load in link._background] == [key(1, 5)]
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
    assert [load.key for load in link._speculative] == [key(0, 2), key(1, 5)]
    assert [load.key for load in link._background] == [key(0, 1)]


def test_a_damaged_expert_that_nobody_needs_stops_nothing() -> None:
    controller, link = controller_with(3, failing=frozenset({key(0, 1)}))
    controller.fill([key(0, 1), key(0, 2)])
    arrive(controller, link)
    assert (controller.counts.warmed, controller.cache.free(0)) == (1, 2)


def test_a_damaged_expert_that_is_needed_is_asked_for_again() -> None:
    controller, link = controller_with(3, failing=frozenset({key(0, 1)}))
    link.poll = lambda: None  # type: ignore[method-assign]
    controller.fill([key(0, 1)])
    link._running.append(link._background.pop(0))
    run = each(controller.run_layer(0, demands(1)))
    original = link.wait

    def heals() -> object:
        finished = original()
        link.failing = frozenset()
        return finished

    link.wait = heals  # type: ignore[method-assign,assignment]
    assert [expert for expert, *_ in run] == [1]


def test_slots_full_of_what_has_begun_for_the_background_are_waited_for() -> None:
    controller, link = controller_with(2)
    link.poll = lambda: None  # type: ignore[method-assign]
    controller.fill([key(1, 1), key(1, 2)])
    link._running, link._background = link._background, []
    assert sorted(expert for expert, *_ in each(controller.run_layer(0, demands(5, 6)))) == [5, 6]


# the scheduler


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_only_where_no_token_depends_on_what_is_there(name: str) -> None:
    changes = {"t1": 0.6, "t2": 0.9, "weights": "0.25,0.25,0.25,0.25", "window": 2, "boundary": 1, "theta": 0.1}
    changes |= {"low_popularity": 0.2}
    preset = PRESETS[name]
    made = {part: changes[part] for part in preset.missing()}
    composition = compose(name, made | ({"prefetch": "none"} if preset.prefetch == "path" else {}))
    slots = [PrecisionSlots((4,), 12)]
    if composition.low_share:
        slots = [PrecisionSlots((4,), 12), PrecisionSlots((2,), 4)]
    found = Tables({(0, 0): 4}, {(0, 0): 1.0})
    scheduler = assemble(composition, ModelShape([4, 4, 4], [2, 2, 2]), slots, link := FakeLink(), 4, found)
    scheduler.fill([])
    assert bool(link.submitted) is (not composition.lossy and composition.cache != "none")


def test_not_all_fit_and_nothing_is_known_nothing_is_read() -> None:
    shape = ModelShape([4, 4, 4], [2, 2, 2])
    scheduler = assemble(compose("default"), shape, [PrecisionSlots((4,), 6)], link := FakeLink(), 4)
    scheduler.fill([])
    assert link.submitted == []
    scheduler.fill([[0, 9, 1, 5], [1, 2, 3, 4], [0, 0, 0, 3]])
    expected = [key(0, 1), key(0, 3), key(1, 3), key(1, 2), key(2, 3)]  # two slots a layer
    assert [load.key for load in link.submitted] == expected


# the links


def wait_for(done: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not done():
        assert time.monotonic() < limit, "it hangs"
        time.sleep(0.001)


def test_lanes_take_the_background_last_and_keep_one_lane_free() -> None:
    begun: queue.SimpleQueue[int] = queue.SimpleQueue()
    go_on = threading.Semaphore(0)

    def work(load: Load) -> None:
        begun.put(load.key.expert)
        go_on.acquire()

    lanes = Lanes(2, work)
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


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_the_disk_fills_slots_while_nobody_asks(tmp_path: Path, lanes: int) -> None:
    path = tmp_path / "experts"
    extents = write_experts(path)
    slots = HostSlots(EXPERTS, SIZE)
    link = DiskLink(filler(extents), slots, lanes)
    cache = pools(EXPERTS, (16,))
    controller = Controller(cache, link)
    controller.fill(ExpertKey(0, expert, 16) for expert in range(EXPERTS))
    assert link.is_idle()  # the background does not count
    wait_for(lambda: link.bytes_read == EXPERTS * SIZE)
    wait_for(lambda: controller.collect() or not controller.filling)
    assert controller.counts.warmed == EXPERTS
    for expert in range(EXPERTS):
        slot = cache.slot(ExpertKey(0, expert, 16))
        assert slot is not None
        assert slots.buffer(slot)[:SIZE].numpy().tobytes() == bytes_of(path, extents[expert])
    link.close()


def test_a_link_is_closed_while_it_fills(tmp_path: Path) -> None:
    extents = write_experts(tmp_path / "experts")
    link = DiskLink(filler(extents), HostSlots(EXPERTS, SIZE), 2)
    Controller(pools(EXPERTS, (16,)), link).fill(ExpertKey(0, expert, 16) for expert in range(EXPERTS))
    link.close()


@pytest.mark.parametrize("seed", range(20))
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
    controller = Controller(pools(count, (16,)), link)
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


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), lanes=st.integers(1, 3), slots=st.integers(6, 24))
def test_gpu_slots_fill_too_and_none_is_overwritten_in_use(seed: int, lanes: int, slots: int) -> None:
    rig, chance = Rig(slots, 4, lanes, seed), random.Random(seed)
    rig.controller.fill(key(layer, expert) for layer in range(4) for expert in range(6))
    for number in range(6):
        rig.layer(number % 4, chance.sample(range(6), 3))
    rig.end()


def test_the_virtual_link_serves_the_background_last() -> None:
    clock = VirtualClock()
    link = VirtualLink(clock, 100.0, lambda _: 100)
    link.submit(Load(key(0, 0), 0, urgent=False, background=True))
    link.submit(Load(key(0, 1), 1, urgent=False, background=True))
    link.submit(Load(key(0, 2), 2, urgent=False, background=True))
    link.submit(Load(key(0, 3), 3, urgent=True))
    assert not link.is_idle()
    assert [link.wait().load.key.expert for _ in range(2)] == [0, 3]  # the first had begun
    assert link.is_idle()
    assert link.withdraw(key(0, 2))
    assert not link.withdraw(key(0, 1))
    assert link.wait().load.key.expert == 1
    assert clock.now == 3.0
