"""Several pools behind one face: which slot, which copy, who is protected."""

from __future__ import annotations

import pytest

from caches import lru, pools
from tiermoe.decide.allotment import Pool
from tiermoe.decide.pools import Pools
from tiermoe.types import Demand, ExpertKey


def fill(cache: Pools, *keys: ExpertKey) -> None:
    for key in keys:
        assert cache.reserve(key) is not None
        cache.arrived(key)


def high_and_low() -> Pools:
    layers = range(2)
    parts = [Pool(2, frozenset({4}), layers), Pool(1, frozenset({2}), layers)]
    return Pools(parts, lambda pool: lru(pool.slots), (4, 2))


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
    cache = Pools([Pool(1, None, range(1)), Pool(1, None, range(1, 2))], lambda pool: lru(pool.slots), (4,))
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
    assert cache.reserve(ExpertKey(0, 2, 4), urgent=False) == 1  # not the least recently used one, which is protected
    assert cache.reserve(ExpertKey(0, 3, 4), urgent=False) is None
    assert cache.reserve(ExpertKey(0, 3, 4)) == 0  # what runs needs its slot


def test_protection_ends_when_the_layer_has_run() -> None:
    cache = pools(1)
    fill(cache, ExpertKey(1, 0, 4))
    cache.protect(ExpertKey(1, 0, 4))
    cache.release_layer(0)
    assert cache.reserve(ExpertKey(2, 0, 4), urgent=False) is None
    cache.release_layer(1)
    assert cache.reserve(ExpertKey(2, 0, 4), urgent=False) == 0


@pytest.mark.parametrize("urgent", [True, False])
def test_pinned_keys_are_no_victims(urgent: bool) -> None:
    cache = pools(1)
    fill(cache, ExpertKey(0, 0, 4))
    cache.pin(ExpertKey(0, 0, 4))
    assert cache.reserve(ExpertKey(0, 1, 4), urgent=urgent) is None
