"""Compositions assembled: the slots of each precision, what is refused, and the parts that come together."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermoe.config import CacheSize
from tiermoe.errors import ProfileError
from tiermoe.lab.simulate.link import InstantLink
from tiermoe.offload.assembly import FutureTrace, ModelShape, PrecisionSlots, assemble, cache_bytes, divide, precisions
from tiermoe.offload.composition import Composition, filled, with_low_share
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
        "theta": 0.1,
    },
    {"table": [[4, 2] * 4] * 4, "frequencies": [[1] * 8] * 4, "paths": {"1": {"0,1": {"2": 3}}}},
)  # fmt: skip


def link() -> InstantLink:
    return InstantLink(lambda key: 1)


def assembled(composition: Composition, slots: list[PrecisionSlots]) -> Scheduler:
    foresight = FutureTrace(lambda key: 0.0, lambda layer: [])
    return assemble(composition, SHAPE, slots, link(), 4, tables(PROFILE), foresight)


def test_a_share_is_kept_for_low_copies() -> None:
    # 80 % of 1000 bytes in slots of 100, 20 % in slots of 50
    assert divide(1000, HOBBIT, {4: 100, 2: 50}, (), 100) == [PrecisionSlots((4,), 8), PrecisionSlots((2,), 4)]


def test_fates_low_copies_have_their_share_of_one_layers_part() -> None:
    """40 % of an eighth of 4,000 bytes, in slots of 50; all of them are the running layer's."""
    fate = with_low_share(compose("fate", {"low_popularity": 0.4, "boundary": 1, "window": 2}), 8)
    slots = divide(4000, fate, {4: 100, 2: 50}, (), 100)
    assert slots == [PrecisionSlots((4,), 38), PrecisionSlots((2,), 4)]
    cache = assembled(fate, slots).loader.cache
    assert [cache.reserve(ExpertKey(2, expert, 2)) for expert in range(5)] == [38, 39, 40, 41, None]
    assert with_low_share(compose("fate", {"low_popularity": 0.4, "low_share": 0}), 8).low_share == 0
    assert with_low_share(compose("fate", {"low_popularity": 0.4, "mispredicted": "low"}), 8).low_share is None


def test_precisions_share_bytes_where_nothing_divides_them() -> None:
    fate = compose("fate", {"low_popularity": 0.4, "low_share": 0})
    assert divide(1050, fate, {4: 100, 2: 50}, (), 100) == [PrecisionSlots((4, 2), 10, (100, 50))]
    edgemoe, table = compose("edgemoe"), [4, 4, 4, 2, 2] * 6
    assert divide(2000, edgemoe, {4: 100, 2: 50}, table, 30) == [PrecisionSlots((4, 2), 20, (100, 50))]
    # no more than there are: 18 of 100 bytes and 12 of 50
    assert divide(9999, edgemoe, {4: 100, 2: 50}, table, 30) == [PrecisionSlots((4, 2), 24, (100, 50))]
    assert divide(1000, edgemoe, {4: 100}, (), 7) == [PrecisionSlots((4,), 7)]


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


def test_precisions_share_whole_slots_where_nothing_divides_them() -> None:
    fate = compose("fate", {"low_popularity": 0.4, "low_share": 0})
    assert divide(1000, fate, {4: 100, 2: 50}, (), 100, whole_slots=True) == [PrecisionSlots((4, 2), 10)]
    table = compose("edgemoe")
    assert divide(1000, table, {4: 100, 2: 84}, [4, 2], 100, whole_slots=True) == [PrecisionSlots((4, 2), 10)]
    assert divide(1000, table, {4: 100}, (), 7, whole_slots=True) == [PrecisionSlots((4,), 7)]


def test_a_table_shares_whole_slots_as_it_uses_them() -> None:
    # three experts at 100 bytes, two at 50: 3/4 and 1/4 of 2000 bytes
    edgemoe, table = compose("edgemoe"), [4, 4, 4, 2, 2] * 6
    shares = divide(2000, edgemoe, {4: 100, 2: 50}, table, 30, whole_slots=True)
    assert shares == [PrecisionSlots((4,), 15), PrecisionSlots((2,), 10)]
    # no more than there are
    shares = divide(9999, edgemoe, {4: 100, 2: 50}, table, 30, whole_slots=True)
    assert shares == [PrecisionSlots((4,), 18), PrecisionSlots((2,), 12)]


def test_a_pool_has_its_least_slots_before_bytes_are_divided() -> None:
    # 20 % of 1400 bytes are 5 slots of 50; of 1000 bytes, 6 take one from the larger pool
    hobbit = {4: 100, 2: 50}
    assert divide(1400, HOBBIT, hobbit, (), 100, least=6) == [PrecisionSlots((4,), 11), PrecisionSlots((2,), 6)]
    assert divide(1000, HOBBIT, hobbit, (), 100, least=6) == [PrecisionSlots((4,), 7), PrecisionSlots((2,), 6)]
    assert divide(0, HOBBIT, hobbit, (), 100, least=6) == [PrecisionSlots((4,), 6), PrecisionSlots((2,), 6)]


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


def test_an_open_setting_names_the_command_that_fills_it() -> None:
    with pytest.raises(ProfileError, match=r"hobbit has no t1 and no t2 and no weights.*--for hobbit"):
        assemble(compose("hobbit"), SHAPE, [PrecisionSlots((4, 2), 8)], link(), 4)


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


def test_precisions_evict_in_pools_of_their_own() -> None:
    cache = assembled(HOBBIT, [PrecisionSlots((4,), 2), PrecisionSlots((2,), 1)]).loader.cache
    assert [cache.reserve(ExpertKey(0, expert, 4)) for expert in range(3)] == [0, 1, None]  # all in flight
    assert [cache.reserve(ExpertKey(0, expert, 2)) for expert in range(2)] == [2, None]


def test_one_share_serves_every_precision() -> None:
    cache = assembled(compose("edgemoe"), [PrecisionSlots((4, 2), 2)]).loader.cache
    assert [cache.reserve(key) for key in (ExpertKey(0, 0, 4), ExpertKey(3, 0, 2), ExpertKey(1, 0, 4))] == [0, 1, None]


def test_no_cache_is_one_pool_whatever_the_allotment() -> None:
    none = compose("mixtral-offload", {"cache": "none", "prefetch": "none"})
    assert none.allotment == "even"
    assert assembled(none, [PrecisionSlots((4,), 2)]).loader.cache.slots == 2


@pytest.mark.parametrize("preset", ["default", "mixtral-offload"])
def test_slots_that_do_not_give_every_layer_its_k_are_one_pool(preset: str) -> None:
    def of_layer_0(slots: int) -> int:
        cache = assembled(compose(preset), [PrecisionSlots((4,), slots)]).loader.cache
        return sum(cache.reserve(ExpertKey(0, expert, 4)) is not None for expert in range(8))

    assert [of_layer_0(slots) for slots in (2, 7, 8, 9)] == [2, 7, 2, 3]


def test_below_a_layers_k_each_shallow_layers_still_come_first() -> None:
    """Six slots for four layers of K = 2: the shallow one has four, the others share two; seven: all but those two."""

    def room(slots: int) -> list[int]:
        fate = compose("fate", {"precision": "fixed", "boundary": 1, "window": 2})
        cache = assembled(fate, [PrecisionSlots((4,), slots)]).loader.cache
        return [
            sum(cache.reserve(ExpertKey(layer, expert, 4)) is not None for expert in range(8)) for layer in range(4)
        ]

    assert [room(slots) for slots in (3, 4, 6, 7)] == [[3, 0, 0, 0], [2, 2, 0, 0], [4, 2, 0, 0], [5, 2, 0, 0]]


def test_a_precision_whose_slots_do_not_go_round_is_one_pool() -> None:
    corm = filled(compose("corm"), PROFILE)
    cache = assembled(corm, [PrecisionSlots((4,), 8), PrecisionSlots((2,), 3)]).loader.cache
    low = [cache.reserve(ExpertKey(0, expert, 2)) for expert in range(4)]
    high = [cache.reserve(ExpertKey(0, expert, 4)) for expert in range(3)]
    assert (low, high) == ([8, 9, 10, None], [0, 1, None])
