"""What the CPU borrows of a GPU link's main memory, against a fake GPU and a fake disk."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fake_gpu import BYTES, content
from gpu_rig import EXPERTS, LAYERS, Rig, key, load, walk, within
from tiermoe.errors import LoadError


def test_what_is_borrowed_lies_in_main_memory_and_is_read_once(rig: Callable[..., Rig]) -> None:
    one = rig(2, 2, 1)
    for _ in range(2):
        assert torch.equal(within(10, lambda: one.link.host.borrow(key(0, 3)))[:BYTES], content(key(0, 3)))
        one.link.host.give_back(key(0, 3))
    within(10, lambda: one.layer(0, [3]))
    assert one.disk.order == [key(0, 3)]
    assert (one.link.host.hits, one.link.host.misses, len(one.gpu.asked)) == (2, 1, 1)


def test_a_slot_that_is_lent_is_not_taken(rig: Callable[..., Rig]) -> None:
    one = rig(2, 1, 2)
    lent = within(10, lambda: one.link.host.borrow(key(0, 3)))
    one.link.submit(load(0, 0))
    threading.Event().wait(0.05)
    assert one.disk.order == [key(0, 3)]
    assert torch.equal(lent[:BYTES], content(key(0, 3)))
    one.link.host.give_back(key(0, 3))
    assert within(10, one.link.wait).error is None
    one.gpu.use(one.device.buffer(0), key(0, 0))


def test_borrowing_waits_for_the_copy_that_holds_the_only_slot(rig: Callable[..., Rig]) -> None:
    one = rig(2, 1, 1)
    one.gpu.hold()
    one.link.submit(load(0, 0))
    within(10, one.link.wait)
    thread = threading.Thread(target=one.link.host.borrow, args=[key(0, 3)])
    thread.start()
    threading.Event().wait(0.05)
    assert one.disk.order == [key(0, 0)]
    one.gpu.release()
    thread.join(10)
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
        while not one.disk.order:
            threading.Event().wait(0.001)
    threading.Event().wait(0.02)
    one.disk.gate.set()
    assert within(10, one.link.wait).error is None
    thread.join(10)
    one.link.host.give_back(key(0, 3))
    one.gpu.use(one.device.buffer(0), key(0, 3))
    assert one.disk.order == [key(0, 3)]


def test_what_cannot_be_read_cannot_be_borrowed_and_the_link_goes_on(rig: Callable[..., Rig]) -> None:
    one = rig(2, 1, 1)
    one.disk.failing = {key(0, 3)}
    with pytest.raises(LoadError, match="layer 0, expert 3"):
        within(10, lambda: one.link.host.borrow(key(0, 3)))
    one.disk.failing.clear()
    within(10, lambda: one.link.host.borrow(key(0, 3)))
    one.link.host.give_back(key(0, 3))
    within(10, lambda: one.layer(0, [0]))


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
    within(20, lambda: walk(one, seed))
    helper.join(20)
    assert not helper.is_alive(), "it hangs"
    assert wrong == []
    assert one.link.host.misses == len(one.disk.order)
    within(20, one.end)
