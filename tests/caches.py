"""Caches for tests: one pool of LRU slots."""

from __future__ import annotations

from collections.abc import Sequence

from tiermoe.decide.allotment import Pool
from tiermoe.decide.eviction import EVICTIONS, Eviction, EvictionContext
from tiermoe.decide.eviction.protocol import Clock
from tiermoe.decide.pools import Pools

LAYERS = 16


def lru(slots: int) -> Eviction:
    return EVICTIONS["lru"](EvictionContext(Clock(), slots, LAYERS))


def lru_of(pools: Sequence[Pool]) -> list[Eviction]:
    return [lru(pool.slots) for pool in pools]


def pools(slots: int, precisions: Sequence[int] = (4,)) -> Pools:
    """One pool for all layers and precisions."""
    return Pools([Pool(slots, None, range(LAYERS))], lru_of, precisions)
