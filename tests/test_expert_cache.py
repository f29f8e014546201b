"""The expert cache: which slot, which copy, who is protected, who leaves, and slots that move between layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_link import lru_of, pools
from tiermoe.offload.cache import ExpertCache
from tiermoe.offload.policies.allotment import Pool, Share, by_use, most_used_slots
from tiermoe.types import Demand, ExpertKey


def fill(cache: ExpertCache, *keys: ExpertKey) -> None:
    for key in keys:
        assert cache.reserve(key) is not None
        cache.arrived(key)


def high_and_low() -> ExpertCache:
    layers = range(2)
    parts = [Pool(2, frozenset({4}), layers), Pool(1, frozenset({2}), layers)]
    return ExpertCache(parts, lru_of, (4, 2))


def test_a_high_copy_satisfies_a_low_demand_and_never_the_other_way_round() -> None:
    cache = high_and_low()
    fill(cache, ExpertKey(0, 1, 4), ExpertKey(0, 2, 2))
    assert cache.find(0, 1, 2) == ExpertKey(0, 1, 4)
    assert cache.find(0, 2, 2) == ExpertKey(0, 2, 2)
    assert cache.find(0, 2, 4) is None
    assert cache.find(0, 2, 0) == ExpertKey(0, 2, 2)
    assert cache.find(0, 3, 0) is None


def test_the_higher_copy_is_found_first_once_it_is_here() -> None:
    cache = high_and_low()
    fill(cache, ExpertKey(0, 1, 2))
    cache.reserve(ExpertKey(0, 1, 4))
    assert (cache.find(0, 1, 2), cache.arriving(0, 1, 2)) == (ExpertKey(0, 1, 2), ExpertKey(0, 1, 4))
    cache.arrived(ExpertKey(0, 1, 4))
    assert (cache.find(0, 1, 2), cache.arriving(0, 1, 2)) == (ExpertKey(0, 1, 4), None)


def test_precisions_evict_apart_and_slots_are_numbered_through() -> None:
    cache = high_and_low()
    fill(cache, ExpertKey(0, 1, 4), ExpertKey(0, 2, 4), ExpertKey(0, 3, 2))
    assert cache.reserve(ExpertKey(0, 4, 2)) == 2  # the low pool's only slot
    assert cache.find(0, 3, 0) is None
    assert {cache.slot(ExpertKey(0, 1, 4)), cache.slot(ExpertKey(0, 2, 4))} == {0, 1}


def test_protected_keys_leave_last_and_never_for_a_prediction() -> None:
    cache = pools(2)
    old, new = ExpertKey(1, 0, 4), ExpertKey(0, 1, 4)
    fill(cache, old, new)
    cache.used([new], [Demand(1, 1, 4)])
    cache.protect(old)
    assert cache.reserve_speculatively(ExpertKey(0, 2, 4)) == 1  # not the least recently used one, which is protected
    assert cache.reserve_speculatively(ExpertKey(0, 3, 4)) is None
    assert cache.reserve(ExpertKey(0, 3, 4)) == 0  # what runs needs its slot


def test_protection_ends_when_the_layer_has_run() -> None:
    cache = pools(1)
    fill(cache, ExpertKey(1, 0, 4))
    cache.protect(ExpertKey(1, 0, 4))
    cache.release_layer(0)
    assert cache.reserve_speculatively(ExpertKey(2, 0, 4)) is None
    cache.release_layer(1)
    assert cache.reserve_speculatively(ExpertKey(2, 0, 4)) == 0


def test_pins_count() -> None:
    cache, key = pools(1), ExpertKey(0, 0, 4)
    fill(cache, key)
    cache.pin(key, key)
    cache.unpin(key)
    assert cache.reserve(ExpertKey(0, 1, 4)) is None
    cache.unpin(key)
    assert cache.reserve(ExpertKey(0, 1, 4)) == 0


def test_a_lent_slot_is_its_residents_until_it_is_taken() -> None:
    cache = pools(3)
    first, second, third = (ExpertKey(0, expert, 4) for expert in range(3))
    fill(cache, first, second)
    ahead = [ExpertKey(1, expert, 4) for expert in range(3)]
    # the free one, then the least recently used
    assert [cache.reserve_speculatively(key) for key in ahead] == [2, 0, 1]
    assert [cache.slot(key) for key in (first, second)] == [0, 1]
    assert cache.reserve(third) is None, "what is lent is no victim again"
    cache.cancel(ahead[1])
    assert ahead[1] not in cache.in_flight
    cache.commit(ahead[2])
    assert [cache.slot(key) for key in (first, second)] == [0, None]
    assert cache.arrived(ahead[2]) == 1
    assert cache.reserve(third) == 0, "the least recently used one, as before it was lent"
    cache.cancel(ahead[0])
    assert cache.free(0) == 1
    assert cache.evictions == 2, "one for what was lent and taken, one for what was reserved"


ROWS = st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=3, max_size=3)


def held(sizes: Sequence[int], uses: Sequence[Sequence[float]]) -> float:
    """Uses of the experts that lie in so many slots a layer, at best."""
    return sum(sum(sorted(row, reverse=True)[:size]) for size, row in zip(sizes, uses, strict=True))


@given(ROWS, st.integers(1, 2), st.integers(0, 12))
def test_no_other_shares_hold_more_uses(uses: list[list[float]], minimum: int, more: int) -> None:
    slots = min(12, 3 * minimum + more)
    found = most_used_slots(slots, uses, minimum)
    assert sum(found) == slots
    assert all(minimum <= size <= 4 for size in found)
    every = (sizes for sizes in product(range(minimum, 5), repeat=3) if sum(sizes) == slots)
    assert held(found, uses) == max(held(sizes, uses) for sizes in every)


def test_what_is_left_goes_round_the_layers() -> None:
    assert most_used_slots(9, [[0.0] * 4] * 3, 1) == [3, 3, 3]
    assert most_used_slots(7, [[0.0] * 2, [0.0] * 8], 1) == [2, 5]
    assert most_used_slots(20, [[1.0] * 4] * 3, 1) == [4, 4, 4]


def test_free_slots_move_at_once_and_others_when_a_layer_misses() -> None:
    cache = ExpertCache(by_use(Share(6, [99] * 2)), lru_of, (4,))
    for expert in range(2):
        assert cache.reserve(ExpertKey(0, expert, 4)) is not None
        cache.arrived(ExpertKey(0, expert, 4))
    cache.follow([[9, 0, 0, 0], [5, 5, 5, 5]])
    assert [cache.free(0), cache.free(1)] == [0, 4]  # 2 and 4: nobody left
    cache.follow([[9, 9, 9, 9], [1, 0, 0, 0]])
    assert [cache.free(0), cache.free(1)] == [2, 2]  # 4 and 2


def test_nobody_leaves_while_another_layer_has_a_free_slot() -> None:
    cache = ExpertCache(by_use(Share(6, [99] * 2)), lru_of, (4,))
    for expert in range(5):  # a layer keeps its minimum of 1
        assert cache.reserve(ExpertKey(0, expert, 4)) is not None
        cache.arrived(ExpertKey(0, expert, 4))
    assert cache.evictions == 0
    assert cache.reserve(ExpertKey(1, 1, 4)) is not None
    assert cache.reserve(ExpertKey(1, 0, 4)) is not None  # a layer below its share gets a slot back
    assert (cache.evictions, cache.slot(ExpertKey(0, 0, 4))) == (1, None)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7), st.booleans()), min_size=30, max_size=120),
    st.integers(6, 14),
)
def test_slots_are_neither_lost_nor_shared(asked: list[tuple[int, int, bool]], slots: int) -> None:
    """Whatever is asked for, protected and pinned meanwhile; a layer can always have its minimum."""
    cache = ExpertCache(by_use(Share(slots, [99] * 3, minimum=2)), lru_of, (4,))
    uses = [[0] * 8 for _ in range(3)]
    pinned: list[ExpertKey] = []
    for layer, expert, protects in asked:
        key = ExpertKey(layer, expert, 4)
        uses[layer][expert] += 1
        if cache.find(*key) is None:
            assert cache.reserve(key) is not None
            cache.arrived(key)
        cache.used([key], [Demand(expert, 1, 4)])
        if protects:
            cache.protect(key)
        pinned.append(key)
        cache.pin(key)
        if len(pinned) > 1:
            cache.unpin(pinned.pop(0))
        cache.follow(uses)
        there = [cache.slot(ExpertKey(row, column, 4)) for row in range(3) for column in range(8)]
        taken = [slot for slot in there if slot is not None]
        assert len(taken) == len(set(taken)) == len(cache)
        assert len(cache) + sum(cache.free(number) for number in range(3)) == slots
        assert set(taken) <= set(range(slots))


@pytest.mark.parametrize("parts", [[Pool(6, None, range(2))], by_use(Share(6, [9, 9], minimum=1))], ids=["one", "two"])
def test_lent_slots_are_those_of_who_would_leave_and_come_back(parts: list[Pool]) -> None:
    cache = ExpertCache(parts, lru_of, (4,))
    keys = [ExpertKey(layer, expert, 4) for expert in range(3) for layer in range(2)]
    fill(cache, *keys[:4])
    assert len(set(cache.lend(3, 1))) == 3  # two that are free, and that of the first
    assert [cache.slot(key) is None for key in keys[:4]] == [True, False, False, False]
    assert len(cache.lend(9, 1)) == (2 if len(parts) == 1 else 1)  # each pool keeps one
    cache.take_back()
    fill(cache, *[key for key in keys if cache.slot(key) is None])
    assert len({cache.slot(key) for key in keys}) == 6


def test_nobody_who_is_pinned_lends_and_an_interruption_brings_all_back() -> None:
    cache = ExpertCache([Pool(3, None, range(1))], lru_of, (4,))
    keys = [ExpertKey(0, expert, 4) for expert in range(3)]
    fill(cache, *keys)
    cache.pin(keys[0], keys[1])
    assert cache.lend(3, 0) == [2]
    cache.roll_back()
    assert cache.free(0) == 1
    assert [cache.slot(key) is None for key in keys] == [False, False, True]


SIZES = {4: 9, 2: 5}


class Memory:
    """What lies in the slots of a cache whose copies share bytes, as the system sees it: pages stay until they are
    given back."""

    def __init__(self, parts: list[Pool]) -> None:
        self.cache = ExpertCache(parts, lru_of, (4, 2), sizes=SIZES)
        self.cache.on_shrink = self.shrink
        self.room = sum(part.slots for part in parts) * SIZES[4]
        self.written: dict[int, int] = {}

    def shrink(self, slot: int, kept: int) -> None:
        self.written[slot] = min(self.written.get(slot, 0), kept)

    def write(self, slot: int, key: ExpertKey) -> None:
        self.written[slot] = max(self.written.get(slot, 0), SIZES[key.bits])
        assert sum(self.written.values()) <= self.room


STEPS = st.tuples(
    st.sampled_from(
        ["load", "load", "use", "abandon", "speculate", "commit", "cancel", "pin", "protect", "lend", "end"]
    ),
    st.integers(0, 2),
    st.integers(0, 5),
    st.sampled_from([4, 2]),
)


@pytest.mark.parametrize(
    "parts", [[Pool(5, None, range(3))], [Pool(2, None, range(layer, layer + 1)) for layer in range(3)],
              by_use(Share(6, [99] * 3))], ids=["one", "even", "by use"]
)  # fmt: skip
@settings(max_examples=150, deadline=None)
@given(script=st.lists(STEPS, min_size=20, max_size=80))
def test_copies_that_share_bytes_never_take_more(parts: list[Pool], script: list[tuple[str, int, int, int]]) -> None:
    """Nor does memory that nobody counts any more stay, whatever leaves for whom."""
    memory = Memory(parts)
    cache = memory.cache
    uses = [[0] * 6 for _ in range(3)]
    begun: dict[ExpertKey, int] = {}  # speculatively
    pinned: list[ExpertKey] = []
    for step, layer, expert, bits in script:
        key = ExpertKey(layer, expert, bits)
        absent = cache.slot(key) is None and key not in cache.in_flight
        if step in ("load", "abandon") and absent and not begun:
            slot = cache.reserve(key)
            if slot is None:
                assert pinned
                continue
            memory.write(slot, key)
            if step == "abandon":
                cache.abandon(key)
            else:
                cache.arrived(key)
        elif step == "speculate" and absent and (slot := cache.reserve_speculatively(key)) is not None:
            begun[key] = slot
        elif step == "cancel" and begun:
            cache.cancel(begun.popitem()[0])
        elif step == "commit" and begun:
            for key, slot in begun.items():
                memory.write(slot, key)
            for key in begun:
                cache.commit(key)
                cache.arrived(key)
            begun.clear()
        elif step == "use" and cache.slot(key) is not None:
            cache.used([key], [Demand(expert, 1, bits)])
            uses[layer][expert] += 1
            cache.follow(uses)
        elif step == "pin" and cache.slot(key) is not None and not begun:
            pinned.append(key)
            cache.pin(key)
        elif step == "protect" and not absent:
            cache.protect(key)
        elif step == "lend" and not begun:
            for slot in cache.lend(expert, 1):
                memory.shrink(slot, 0)
            cache.take_back()
        elif step == "end":
            cache.roll_back()
            begun.clear()
            pinned.clear()
        held = {key: slot for row in range(3) for column in range(6) for each in (4, 2)
                if (slot := cache.slot(key := ExpertKey(row, column, each))) is not None}  # fmt: skip
        assert len(set(held.values())) == len(held) == len(cache)
        assert held.keys() >= set(pinned)
        assert sum(SIZES[key.bits] for key in held) <= memory.room
        assert all(memory.written[slot] >= SIZES[key.bits] for key, slot in held.items())


def test_what_is_fetched_has_room_until_its_layer_has_run() -> None:
    """Two slots a layer and a room of two: nobody leaves for what is fetched, and then those that LRU does not keep."""
    layers = [Pool(2, None, range(1)), Pool(2, None, range(1, 2))]
    cache = ExpertCache(layers, lru_of, (4,), room=2)
    a, b, c, d, e = (ExpertKey(0, expert, 4) for expert in range(5))
    fill(cache, a, b, c)
    ahead = ExpertKey(1, 0, 4)
    assert cache.reserve_speculatively(d) is not None
    assert cache.reserve_speculatively(ahead) is not None
    cache.commit(d)
    assert cache.evictions == 0
    cache.arrived(d)
    cache.used([a, c], [Demand(0, 1, 4), Demand(2, 1, 4)])
    assert cache.reserve(e) is not None, "the room is full"
    cache.arrived(e)
    cache.used([e], [Demand(4, 1, 4)])
    assert [cache.slot(key) is None for key in (a, b, c, d)] == [False, True, False, False]
    assert cache.release_layer(0) == 2
    assert [cache.slot(key) is None for key in (a, c, d, e)] == [True, False, True, False]
    cache.cancel(ahead)
    assert [cache.free(0), cache.free(1)] == [0, 2]
    fill(cache, *(ExpertKey(1, expert, 4) for expert in range(4)))
    assert cache.evictions == 3, "layer 1 has the whole room"
    cache.roll_back()
    assert cache.release_layer(1) == 2
