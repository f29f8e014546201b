"""Compositions assembled: the slots of each precision, what is refused, and the parts that come together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermoe.config import CacheSize
from tiermoe.lab.simulate.link import InstantLink
from tiermoe.offload.assembly import FutureTrace, ModelShape, PrecisionSlots, assemble, cache_bytes, divide, precisions
from tiermoe.offload.composition import Composition, filled, with_low_share
from tiermoe.offload.policies.routing import MissCosts
from tiermoe.offload.presets import PRESETS, compose
from tiermoe.offload.profiles import Profile, Tables, tables
from tiermoe.offload.scheduler import Scheduler
from tiermoe.types import ExpertKey

SHAPE = ModelShape([8] * 4, [2] * 4)
HOBBIT = compose("hobbit", {"t1": 0.6, "t2": 0.9, "weights": (0.25, 0.25, 0.25, 0.25)})
PROFILE = Profile(
    "any",
    "abc",
    {},
    {
        "t1": 0.5, "t2": 0.8, "weights": [0.1, 0.2, 0.3, 0.4], "low_popularity": 0.3, "window": 3, "boundary": 1,
        "theta": 0.1, "layer_recall": [0.5] * 4, "layer_uses": [1.5] * 4,
    },
    {"table": [[4, 2] * 4] * 4, "frequencies": [[1] * 8] * 4, "paths": {"1": {"0,1": {"2": 3}}}},
)  # fmt: skip


def link() -> InstantLink:
    return InstantLink(lambda key: 1)


def assembled(composition: Composition, slots: list[PrecisionSlots]) -> Scheduler:
    foresight = FutureTrace(lambda key: 0.0, lambda layer: [])
    costs = MissCosts(None, None)
    return assemble(composition, SHAPE, slots, link(), 4, tables(PROFILE), foresight, miss_costs=lambda: costs)


FATE = compose("fate", {"low_popularity": 0.4, "low_share": 0})
EDGEMOE = compose("edgemoe")
TWO = {4: 100, 2: 50}
TABLE = [4, 4, 4, 2, 2] * 6


@pytest.mark.parametrize(
    ("nbytes", "composition", "sizes", "table", "options", "expected"),
    [
        # 80 % of 1000 bytes in slots of 100, 20 % in slots of 50
        (1000, HOBBIT, TWO, (), {}, [((4,), 8), ((2,), 4)]),
        # 20 % of 1400 bytes are 5 slots of 50; of 1000 bytes, 6 take one from the larger pool
        (1400, HOBBIT, TWO, (), {"least": 6}, [((4,), 11), ((2,), 6)]),
        (1000, HOBBIT, TWO, (), {"least": 6}, [((4,), 7), ((2,), 6)]),
        (0, HOBBIT, TWO, (), {"least": 6}, [((4,), 6), ((2,), 6)]),
        # precisions share bytes where nothing divides them; no more than there are: 18 of 100 bytes and 12 of 50
        (1050, FATE, TWO, (), {}, [((4, 2), 10, (100, 50))]),
        (2000, EDGEMOE, TWO, TABLE, {}, [((4, 2), 20, (100, 50))]),
        (9999, EDGEMOE, TWO, TABLE, {}, [((4, 2), 24, (100, 50))]),
        (1000, EDGEMOE, {4: 100}, [4] * 7, {}, [((4,), 7)]),
        # whole slots: of the largest, or as a table uses them: three at 100 bytes, two at 50: 3/4 and 1/4 of 2000
        (1000, FATE, TWO, (), {"whole_slots": True}, [((4, 2), 10)]),
        (1000, EDGEMOE, {4: 100, 2: 84}, [4, 2] * 16, {"whole_slots": True}, [((4, 2), 10)]),
        (1000, EDGEMOE, {4: 100}, [4] * 7, {"whole_slots": True}, [((4,), 7)]),
        (2000, EDGEMOE, TWO, TABLE, {"whole_slots": True}, [((4,), 15), ((2,), 10)]),
        (9999, EDGEMOE, TWO, TABLE, {"whole_slots": True}, [((4,), 18), ((2,), 12)]),
    ],
)
def test_bytes_are_divided(
    nbytes: int,
    composition: Composition,
    sizes: dict[int, int],
    table: list[int],
    options: dict[str, Any],
    expected: list[tuple[Any, ...]],
) -> None:
    experts = len(table) or 100
    assert divide(nbytes, composition, sizes, table, experts, **options) == [PrecisionSlots(*each) for each in expected]


def test_fates_low_copies_have_their_share_of_one_layers_part() -> None:
    """40 % of an eighth of 4,000 bytes, in slots of 50; all of them are the running layer's."""
    fate = with_low_share(compose("fate", {"low_popularity": 0.4, "boundary": 1, "window": 2}), 8)
    slots = divide(4000, fate, {4: 100, 2: 50}, (), 100)
    assert slots == [PrecisionSlots((4,), 38), PrecisionSlots((2,), 4)]
    cache = assembled(fate, slots).loader.cache
    assert [cache.reserve(ExpertKey(2, expert, 2)) for expert in range(5)] == [38, 39, 40, 41, None]
    assert with_low_share(compose("fate", {"low_popularity": 0.4, "low_share": 0}), 8).low_share == 0
    assert with_low_share(compose("fate", {"low_popularity": 0.4, "mispredicted": "low"}), 8).low_share is None


def test_a_high_copy_takes_the_bytes_of_two_low_ones() -> None:
    """EdgeMoE's one budget: 500 bytes hold five experts at 4 bits or ten at 2."""
    lru = compose("lru", {"precision": "table"})
    cache = assembled(lru, divide(500, lru, {4: 100, 2: 50}, [4, 2] * 16, 32)).loader.cache
    low = [ExpertKey(0, 2 * expert + 1, 2) for expert in range(4)] + [ExpertKey(1, 1, 2)]
    high = [ExpertKey(2, 2 * expert, 4) for expert in range(4)]
    slots = {key: cache.reserve(key) for key in (*low, *high[:2])}
    assert None not in slots.values()
    assert len(set(slots.values())) == 7
    for key in slots:
        cache.arrived(key)
    assert cache.free(0) == 50
    assert cache.reserve(high[2]) is not None
    assert (cache.evictions, cache.free(0)) == (1, 0)
    assert cache.reserve(high[3]) is not None
    assert cache.evictions == 3


@given(
    st.integers(0, 10_000),
    st.dictionaries(st.sampled_from([2, 4, 8]), st.integers(1, 300), min_size=1),
    st.sampled_from(["hobbit", "edgemoe", "lru"]),
    st.booleans(),
)
def test_slots_never_exceed_the_bytes(nbytes: int, sizes: dict[int, int], preset: str, whole_slots: bool) -> None:
    shares = divide(nbytes, PRESETS[preset], sizes, list(sizes), 1000, whole_slots=whole_slots)
    taken = sum(share.slots * max(sizes[bits] for bits in share.bits) for share in shares)
    # one slot of each there is in any case
    assert taken <= max(nbytes, sum(sizes.values()))
    assert all(share.slots >= 1 for share in shares)
    assert sorted(bits for share in shares for bits in share.bits) == sorted(sizes)


def test_the_bytes_of_a_cache() -> None:
    lru = compose("lru")
    assert cache_bytes(lru, CacheSize(fraction=0.3), SHAPE, {4: 10, 2: 5}) == 90  # 9.6 of 32 experts
    assert cache_bytes(lru, CacheSize(nbytes=123), SHAPE, {4: 10}) == 123
    assert cache_bytes(compose("load-on-demand"), CacheSize(fraction=0.5), SHAPE, {4: 10}) == 20
    assert cache_bytes(compose("io-free"), CacheSize(fraction=0.5), SHAPE, {4: 10}) == 320


def test_the_precisions_that_are_loaded() -> None:
    assert precisions(compose("lru"), 8, {}) == (8,)
    assert precisions(compose("io-qexp"), 8, {}) == (4,)
    assert precisions(HOBBIT, 8, {}) == (8, 2)
    assert precisions(compose("frugal"), 4, {}) == (4,)  # between equal thresholds nothing is low
    assert precisions(compose("edgemoe"), 8, {(0, 0): 2, (0, 1): 4}) == (4, 2)


def test_a_profile_fills_what_is_open_and_nothing_else() -> None:
    composition = filled(compose("hobbit", {"t1": 0.6}), PROFILE)
    assert tuple(composition[name] for name in ("t1", "t2", "weights")) == (0.6, 0.8, (0.1, 0.2, 0.3, 0.4))
    assert composition.boundary is None


def test_the_tables_of_a_profile() -> None:
    found = tables(PROFILE)
    assert found.bits[3, 1] == 2
    assert found.frequencies[2, 7] == 1
    assert found.paths == {1: {((0, 1),): {2: 3}}}
    by_layer = dataclasses.replace(PROFILE, data={"table": {"1": [4, 8]}})
    assert tables(by_layer).bits == {(1, 0): 4, (1, 1): 8}
    assert tables(None) == Tables()


@pytest.mark.parametrize(
    ("name", "slots", "changes", "settles"),
    [
        ("default", 32, {}, True),
        ("frugal", 32, {}, True),
        ("default", 31, {}, False),
        ("mobile", 32, {}, False),
        ("default", 32, {"routing": "layer"}, False),
    ],
)
def test_nothing_is_decided_where_everything_fits(
    name: str, slots: int, changes: dict[str, str], settles: bool
) -> None:
    assert assembled(compose(name, changes), [PrecisionSlots((4,), slots)]).settles is settles


def room(composition: Composition, *slots: PrecisionSlots, bits: int = 4) -> list[int]:
    """How many experts of each layer find a slot, layer after layer; what has one is in flight."""
    cache = assembled(composition, list(slots)).loader.cache
    return [sum(cache.reserve(ExpertKey(layer, expert, bits)) is not None for expert in range(8)) for layer in range(4)]


SHALLOW = compose("fate", {"precision": "fixed", "boundary": 1, "window": 2})
NO_CACHE = compose("mixtral-offload", {"cache": "none", "prefetch": "none"})


@pytest.mark.parametrize(
    ("composition", "slots", "bits", "expected"),
    [
        # slots that do not give every layer its K are one pool
        *((compose(name), [((4,), count)], 4, [layers, *[0 if layers > 3 else layers] * 3])
          for name in ("default", "mixtral-offload") for count, layers in ((7, 7), (8, 2))),
        # below a layer's K each, shallow layers still come first: they have what the others leave of their two
        *((SHALLOW, [((4,), count)], 4, layers)
          for count, layers in ((3, [3, 0, 0, 0]), (4, [2, 2, 0, 0]), (6, [4, 2, 0, 0]), (7, [5, 2, 0, 0]))),
        # precisions evict in pools of their own, or share one; where slots do not go round they are one pool
        *((HOBBIT, [((4,), 2), ((2,), 1)], bits, [count, 0, 0, 0]) for bits, count in ((4, 2), (2, 1))),
        (EDGEMOE, [((4, 2), 2)], 2, [2, 0, 0, 0]),
        *((filled(compose("corm"), PROFILE), [((4,), 8), ((2,), 3)], bits, layers)
          for bits, layers in ((4, [2, 2, 2, 2]), (2, [3, 0, 0, 0]))),
        # without a cache there is one pool, whatever the allotment
        (NO_CACHE, [((4,), 2)], 4, [2, 0, 0, 0]),
    ],
)  # fmt: skip
def test_slots_are_pools(
    composition: Composition, slots: list[tuple[tuple[int, ...], int]], bits: int, expected: list[int]
) -> None:
    assert room(composition, *(PrecisionSlots(*each) for each in slots), bits=bits) == expected


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_assembles(name: str) -> None:
    composition = filled(compose(name), PROFILE)
    loaded = precisions(composition, 4, tables(PROFILE).bits)
    slots = divide(1600, composition, {bits: bits * 20 for bits in loaded}, tables(PROFILE).bits.values(), 32)
    scheduler = assembled(composition, slots)
    assert scheduler.loader.cache.slots == sum(share.slots for share in slots)
    assert scheduler.together is (name == "hobbit")
    assert scheduler.whole_layer is (name == "sti")
    assert scheduler.proceed is (name == "corm")
