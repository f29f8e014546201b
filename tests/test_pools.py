"""Several pools behind one face: which slot, which copy, who is protected."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from caches import lru_of, pools
from tiermoe.decide.allotment import Pool
from tiermoe.decide.eviction import EVICTIONS, EvictionContext
from tiermoe.decide.eviction.protocol import Clock
from tiermoe.decide.pools import Pools
from tiermoe.types import Demand, ExpertKey


def fill(cache: Pools, *keys: ExpertKey) -> None:
    for key in keys:
        assert cache.reserve(key) is not None
        cache.arrived(key)


def high_and_low() -> Pools:
    layers = range(2)
    parts = [Pool(2, frozenset({4}), layers), Pool(1, frozenset({2}), layers)]
    return Pools(parts, lru_of, (4, 2))


def test_a_high_copy_satisfies_a_low_demand_and_never_the_other_way_round() -> None:
    cache = high_and_low()
    fill(cache, ExpertKey(0, 1, 4), ExpertKey(0, 2, 2))
    assert cache.find(0, 1, 2) == ExpertKey(0, 1, 4)
    assert cache.find(0, 2, 2) == ExpertKey(0, 2, 2)
    assert cache.find(0, 2, 4) is None
    assert cache.find(0, 2, 0) == ExpertKey(0, 2, 2)
    assert cache.find(0, 3, 0) is None


def test_the_higher_copy_is_found_first() -> None:
    cache = high_and_low()
    fill(cache, ExpertKey(0, 1, 2), ExpertKey(0, 1, 4))
    assert cache.find(0, 1, 2) == ExpertKey(0, 1, 4)


def test_precisions_evict_apart_and_slots_are_numbered_through() -> None:
    cache = high_and_low()
    fill(cache, ExpertKey(0, 1, 4), ExpertKey(0, 2, 4), ExpertKey(0, 3, 2))
    assert cache.reserve(ExpertKey(0, 4, 2)) == 2  # the low pool's only slot
    assert cache.find(0, 3, 0) is None
    assert {cache.slot(ExpertKey(0, 1, 4)), cache.slot(ExpertKey(0, 2, 4))} == {0, 1}


def test_a_layer_of_its_own_pool_takes_nothing_from_another() -> None:
    cache = Pools([Pool(1, None, range(1)), Pool(1, None, range(1, 2))], lru_of, (4,))
    fill(cache, ExpertKey(0, 0, 4), ExpertKey(1, 0, 4))
    fill(cache, ExpertKey(1, 1, 4))
    assert cache.find(0, 0, 4) is not None
    assert cache.find(1, 0, 4) is None


def test_what_is_arriving_is_not_found_but_known() -> None:
    cache = pools(2)
    cache.reserve(ExpertKey(0, 0, 4))
    assert cache.find(0, 0, 4) is None
    assert cache.arriving(0, 0, 4) == ExpertKey(0, 0, 4)


def test_protected_keys_leave_last_and_never_for_a_prediction() -> None:
    cache = pools(2)
    old, new = ExpertKey(1, 0, 4), ExpertKey(0, 1, 4)
    fill(cache, old, new)
    cache.used(new, Demand(1, 1, 4))
    cache.protect(old)
    assert cache.lend(ExpertKey(0, 2, 4)) == 1  # not the least recently used one, which is protected
    assert cache.lend(ExpertKey(0, 3, 4)) is None
    assert cache.reserve(ExpertKey(0, 3, 4)) == 0  # what runs needs its slot


def test_protection_ends_when_the_layer_has_run() -> None:
    cache = pools(1)
    fill(cache, ExpertKey(1, 0, 4))
    cache.protect(ExpertKey(1, 0, 4))
    cache.release_layer(0)
    assert cache.lend(ExpertKey(2, 0, 4)) is None
    cache.release_layer(1)
    assert cache.lend(ExpertKey(2, 0, 4)) == 0


def test_pinned_keys_are_no_victims() -> None:
    cache = pools(1)
    fill(cache, ExpertKey(0, 0, 4))
    cache.pin(ExpertKey(0, 0, 4))
    assert cache.reserve(ExpertKey(0, 1, 4)) is None
    assert cache.lend(ExpertKey(0, 1, 4)) is None


def test_a_lent_slot_is_its_residents_until_it_is_taken() -> None:
    cache = pools(3)
    first, second, third = (ExpertKey(0, expert, 4) for expert in range(3))
    fill(cache, first, second)
    ahead = [ExpertKey(1, expert, 4) for expert in range(3)]
    assert [cache.lend(key) for key in ahead] == [2, 0, 1]  # the free one, then the least recently used
    assert [cache.slot(key) for key in (first, second)] == [0, 1]
    assert cache.reserve(third) is None, "what is lent is no victim again"
    cache.give_back(ahead[1])
    assert not cache.in_flight(ahead[1])
    cache.take(ahead[2])
    assert [cache.slot(key) for key in (first, second)] == [0, None]
    assert cache.arrived(ahead[2]) == 1
    assert cache.reserve(third) == 0, "the least recently used one, as before it was lent"
    cache.give_back(ahead[0])
    assert cache.free(0) == 1
    assert cache.evictions == 2, "one for what was lent and taken, one for what was reserved"


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(set(EVICTIONS) - {"belady", "random"})),
    used=st.lists(st.integers(0, 7), min_size=5, max_size=60),
    lent=st.sets(st.integers(10, 19), min_size=1, max_size=4),
)
def test_whatever_is_given_back_leaves_every_policy_as_it_was(name: str, used: list[int], lent: set[int]) -> None:
    """Requests one by one through two equal caches, one of which lends slots between them and gives them back."""
    caches = [pools_of(name), pools_of(name)]
    plain, lending = caches
    assert [use(plain, expert, ()) for expert in used] == [use(lending, expert, lent) for expert in used]


def pools_of(name: str) -> Pools:
    """Three slots under a policy."""
    options = {"weights": (0.4, 0.3, 0.2, 0.1)} if name == "weighted" else {}
    context = EvictionContext(Clock(), 3, 1)
    return Pools([Pool(3, None, range(1))], lambda _: [EVICTIONS[name](context, **options)], [4])


def use(cache: Pools, expert: int, lent: Iterable[int]) -> bool:
    key = ExpertKey(0, expert, 4)
    hit = cache.slot(key) is not None
    if not hit:
        assert cache.reserve(key) is not None
        cache.arrived(key)
    cache.used(key, Demand(expert, 1, 4))
    asked = [other for each in lent if cache.lend(other := ExpertKey(0, each, 4)) is not None]
    for other in asked:
        cache.give_back(other)
    return hit
