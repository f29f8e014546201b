"""A GPU's slots behind those in main memory, and what the CPU borrows of them, against a fake GPU and a fake disk."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fake_gpu import BYTES, FakeDisk, FakeGpu, Stream, content, put_on
from gpu_rig import EXPERTS, LAYERS, Rig, key, load, walk
from patience import PATIENCE_S, until, within
from tiermoe.engine.service import tiers_of
from tiermoe.errors import BudgetError, LoadError
from tiermoe.offload import slots
from tiermoe.types import Demand


@settings(max_examples=25, deadline=None, phases=[Phase.generate])  # a hang takes long to shrink
@given(st.integers(0, 2**20), st.integers(3, 8), st.integers(1, 8), st.integers(1, 3))
def test_every_computation_sees_its_expert(seed: int, device_slots: int, host_slots: int, lanes: int) -> None:
    one = Rig(device_slots, host_slots, lanes, seed)
    loads = within(lambda: walk(one, seed))
    within(one.end)
    assert one.link.host.hits + one.link.host.misses == loads
    assert one.link.counters().bytes_copied == loads * BYTES
    assert one.link.counters().bytes_read == one.link.host.misses * BYTES


@pytest.mark.parametrize("forgets", ["copies", "computing"])
def test_a_missing_wait_is_found(forgets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_event = Stream.wait_event

    def forget(stream: Stream, event: Any) -> None:
        if (stream is stream._gpu._computing) == (forgets == "copies"):
            wait_event(stream, event)

    def violations(seed: int) -> list[str]:
        one = Rig(3, 2, 2, seed)
        within(lambda: walk(one, seed))
        within(one.gpu.finish)
        one.link.close()
        return one.gpu.violations

    monkeypatch.setattr(Stream, "wait_event", forget)
    assert any(violations(seed) for seed in range(50))


def test_an_urgent_copy_waits_for_no_speculative_one(rig: Callable[..., Rig]) -> None:
    one = rig(3, 3, 1)
    for expert in range(2):
        one.link.submit(load(expert, expert))
        within(one.link.wait)
    one.gpu.hold(speculative_alone=True)
    one.link.submit(load(0, 2, urgent=False))
    until(lambda: len(one.gpu.asked) == 3)
    one.link.submit(load(1, 1))
    until(lambda: one.gpu.asked[3].done)
    assert not one.gpu.asked[2].done


def test_what_computing_waits_for_copies_is_waiting(rig: Callable[..., Rig]) -> None:
    one = rig(3, 3, 1)
    one.gpu.copy_s = 1e5  # of its clock: no time passes
    one.gpu.hold(speculative_alone=True)
    one.link.submit(load(0, 0, urgent=False))
    within(one.link.wait)
    until(lambda: one.gpu._computing.reached == 2)  # its mark, and the beginning of its wait
    assert one.link.counters().wait_s < 1e5
    one.gpu.release()
    waited = until(lambda: (found := one.link.counters()).wait_s >= 1e5 and found)
    assert one.link.counters() == waited
    assert waited.wait_s < 2e5
    assert (waited.bytes_copied, waited.copy_s, waited.bandwidth) == (BYTES, 1e5, BYTES / 1e5)
    assert waited.read_bandwidth != waited.bandwidth


def test_main_memory_is_filled_while_nothing_else_is_read(rig: Callable[..., Rig]) -> None:
    one = rig(5, 6, 1)
    one.disk.gate.clear()
    one.disk.failing = {key(0, 2)}
    one.link.submit(load(0, 0))
    until(lambda: one.disk.order)
    one.link.fill([key(0, expert) for expert in (0, 1, 2, 3)])
    one.link.submit(load(4, 1))
    one.disk.gate.set()
    until(lambda: len(one.link.host) == 4)
    assert one.disk.order == [key(0, expert) for expert in (0, 4, 1, 2, 3)]
    assert (one.link.host.hits, one.link.host.misses) == (0, 2)
    for _ in range(2):
        within(one.link.wait)
    one.link.submit(load(3, 2))
    assert within(one.link.wait).error is None
    assert one.link.host.hits == 1


def test_nothing_leaves_for_what_main_memory_is_filled_with(rig: Callable[..., Rig]) -> None:
    one = rig(5, 2, 1)
    one.link.fill([key(1, expert) for expert in range(4)])
    until(lambda: len(one.link.host) == 2)
    one.link.submit(load(0, 0))
    within(one.link.wait)
    assert one.disk.order == [key(1, 0), key(1, 1), key(0, 0)]


def test_filling_goes_on_after_an_interruption(rig: Callable[..., Rig]) -> None:
    one = rig(3, 4, 1)
    one.disk.gate.clear()
    one.link.fill([key(0, expert) for expert in range(4)])
    until(lambda: one.disk.order)
    rolling = threading.Thread(target=one.link.roll_back)
    rolling.start()
    until(lambda: not one.link._threads._background)
    one.disk.gate.set()
    rolling.join(PATIENCE_S)
    until(lambda: len(one.link.host) == 4)
    assert one.disk.order == [key(0, expert) for expert in range(4)]


@settings(max_examples=15, deadline=None, phases=[Phase.generate])  # a hang takes long to shrink
@given(st.integers(0, 2**20), st.integers(1, 8), st.integers(1, 3))
def test_loads_go_on_while_main_memory_is_filled(seed: int, host_slots: int, lanes: int) -> None:
    one = Rig(5, host_slots, lanes, seed)
    one.link.fill(key(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS))
    loads = within(lambda: walk(one, seed))
    within(one.end)
    assert one.link.host.hits + one.link.host.misses == loads


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each run of slots that is pinned; a driver that pins no more than 40,000."""
    found: list[int] = []

    def pin(tensor: torch.Tensor) -> None:
        if sum(found) + tensor.numel() > 40_000:
            raise BudgetError("refused")
        found.append(tensor.numel())

    monkeypatch.setattr(slots, "pin_memory", pin)
    monkeypatch.setattr(slots, "unpin_memory", lambda tensor: found.remove(tensor.numel()))
    put_on(FakeGpu(0), monkeypatch)
    return found


def test_main_memory_has_slots_of_each_precision_s_size(pinned: list[int]) -> None:
    disk, runs = FakeDisk(), [((8, 4), 3, 2 * BYTES), ((2,), 2, BYTES)]
    made = tiers_of([(4, 2 * BYTES, False), (1, BYTES, False)], disk, 1, lambda key: BYTES, "cuda", runs)
    assert pinned == [3 * 2 * BYTES, 2 * BYTES]
    assert [len(made.slots.buffer(slot)) for slot in range(5)] == [2 * BYTES] * 4 + [BYTES]
    made.link.close()
    assert not pinned


def test_slots_that_cannot_be_pinned_give_the_others_back(pinned: list[int]) -> None:
    runs = [((4,), 3, 2 * BYTES), ((2,), 9, BYTES)]
    with pytest.raises(BudgetError, match="refused"):
        tiers_of([(4, 2 * BYTES, False)], FakeDisk(), 1, lambda key: BYTES, "cuda", runs)
    assert not pinned


def test_poll_leaves_copies_under_way(rig: Callable[..., Rig]) -> None:
    one = rig(2, 2, 1)
    one.gpu.hold()
    one.link.submit(load(0, 0))
    until(lambda: one.gpu.asked)
    assert one.link.poll() is None
    one.gpu.release()
    polled = until(one.link.poll)
    assert polled.load.key == key(0, 0)
    assert one.link.poll() is None


def test_a_failed_read_comes_back_and_the_link_goes_on(rig: Callable[..., Rig]) -> None:
    one = rig(3, 1, 2)
    one.disk.failing = {key(0, 1)}
    with pytest.raises(LoadError, match="layer 0, expert 1"):
        within(lambda: one.layer(0, [0, 1, 2]))
    one.disk.failing.clear()
    within(lambda: one.layer(0, [0, 1, 2]))
    one.disk.failing = {key(1, expert) for expert in range(EXPERTS)}
    within(lambda: one.controller.prefetch([key(1, 3)]))
    within(one.controller.drain)
    one.disk.failing.clear()
    within(lambda: one.layer(1, [3, 4]))


def test_a_refused_copy_comes_back_and_the_link_goes_on(rig: Callable[..., Rig]) -> None:
    one = rig(3, 1, 1)
    one.gpu.failure = RuntimeError("the fake GPU refuses to copy")
    with pytest.raises(RuntimeError, match="refuses to copy"):
        within(lambda: one.layer(0, [0]))
    with pytest.raises(RuntimeError, match="refuses to copy"):
        within(lambda: one.layer(0, [0]))  # this time from main memory
    one.gpu.failure = None
    within(lambda: one.layer(0, [0, 1, 2]))
    assert one.disk.reads[key(0, 0)] == 1


def test_recall_and_urgent_first(rig: Callable[..., Rig]) -> None:
    one = rig(5, 5, 1)
    one.disk.gate.clear()
    one.link.submit(load(0, 0, urgent=False))
    until(lambda: one.disk.order)
    speculative = [load(expert, expert, urgent=False) for expert in (1, 2)]
    for each in speculative:
        one.link.submit(each)
    one.link.submit(load(3, 3))
    one.link.submit(speculative_again := load(4, 4, urgent=False))
    assert one.link.recall() == [*speculative, speculative_again]
    assert one.link.recall() == []
    one.link.submit(speculative[0])
    one.disk.gate.set()
    assert {within(one.link.wait).load.slot for _ in range(3)} == {0, 1, 3}
    assert one.disk.order == [key(0, 0), key(0, 3), key(0, 1)]
    assert one.link.poll() is None


def test_speculative_copies_run_one_by_one(rig: Callable[..., Rig]) -> None:
    """So that those behind can be recalled, also where nothing has to be read."""
    one = rig(3, 3, 1)
    for expert in range(3):
        one.link.submit(load(expert, expert))
        within(one.link.wait)
    one.gpu.hold()
    for expert in range(3):
        one.link.submit(load(expert, expert, urgent=False))
    until(lambda: len(one.gpu.asked) == 4)
    threading.Event().wait(0.05)
    assert len(one.gpu.asked) == 4
    assert [each.slot for each in one.link.recall()] == [1, 2]
    one.link.submit(load(1, 1))  # urgent: begins at once
    assert len(one.gpu.asked) == 5
    one.gpu.release()
    assert {within(one.link.wait).load.slot for _ in range(2)} == {0, 1}


def test_an_interrupted_run_is_rolled_back(rig: Callable[..., Rig]) -> None:
    made = rig(3, 3, 2)
    made.layer(0, [0, 1])
    run = made.controller.run_layer(0, [Demand(expert, 1, 4) for expert in (0, 2, 3, 4)])
    next(run)
    made.controller.prefetch([key(1, 5), key(1, 6)])
    made.link.roll_back()
    made.controller.roll_back()
    assert not made.controller.cache.in_flight
    for layer in range(3):
        made.layer(layer, [0, 2, 3, 4, 5])


def test_borrowing_waits_for_the_copy_that_holds_the_only_slot(rig: Callable[..., Rig]) -> None:
    one = rig(2, 1, 1)
    one.gpu.hold()
    one.link.submit(load(0, 0))
    within(one.link.wait)
    thread = threading.Thread(target=one.link.host.borrow, args=[key(0, 3)])
    thread.start()
    threading.Event().wait(0.05)
    assert one.disk.order == [key(0, 0)]
    one.gpu.release()
    thread.join(PATIENCE_S)
    assert one.disk.order == [key(0, 0), key(0, 3)]
    one.link.host.give_back(key(0, 3))


@pytest.mark.parametrize("borrow_first", [True, False])
def test_what_is_loaded_and_borrowed_at_once_is_read_once(borrow_first: bool, rig: Callable[..., Rig]) -> None:
    one = rig(2, 3, 1)
    one.disk.gate.clear()
    thread = threading.Thread(target=one.link.host.borrow, args=[key(0, 3)])
    begin = [thread.start, lambda: one.link.submit(load(3, 0))]
    for start in begin if borrow_first else reversed(begin):
        start()
        until(lambda: one.disk.order)
    threading.Event().wait(0.02)
    one.disk.gate.set()
    assert within(one.link.wait).error is None
    thread.join(PATIENCE_S)
    one.link.host.give_back(key(0, 3))
    one.gpu.use(one.device.buffer(0), key(0, 3))
    assert one.disk.order == [key(0, 3)]


def test_what_cannot_be_read_cannot_be_borrowed_and_the_link_goes_on(rig: Callable[..., Rig]) -> None:
    one = rig(2, 1, 1)
    one.disk.failing = {key(0, 3)}
    with pytest.raises(LoadError, match="layer 0, expert 3"):
        within(lambda: one.link.host.borrow(key(0, 3)))
    one.disk.failing.clear()
    within(lambda: one.link.host.borrow(key(0, 3)))
    one.link.host.give_back(key(0, 3))
    within(lambda: one.layer(0, [0]))


@settings(max_examples=15, deadline=None, phases=[Phase.generate])  # a hang takes long to shrink
@given(st.integers(0, 2**20), st.integers(1, 6), st.integers(1, 3))
def test_what_is_lent_stays_while_loads_go_on(seed: int, host_slots: int, lanes: int) -> None:
    one = Rig(5, host_slots, lanes, seed)
    chooser, wrong = random.Random(seed), []

    def borrow() -> None:
        for _ in range(40):
            asked = key(chooser.randrange(LAYERS), chooser.randrange(EXPERTS))
            lent = one.link.host.borrow(asked)
            threading.Event().wait(chooser.random() * 5e-4)
            if not torch.equal(lent[:BYTES], content(asked)):
                wrong.append(asked)
            one.link.host.give_back(asked)

    helper = threading.Thread(target=borrow, daemon=True)
    helper.start()
    within(lambda: walk(one, seed))
    within(helper.join)
    assert wrong == []
    assert one.link.host.misses == len(one.disk.order)
    within(one.end)
