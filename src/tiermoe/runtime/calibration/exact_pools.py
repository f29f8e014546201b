"""An engine's cache for measuring what a precision costs: a copy of more bits does not stand for one of fewer."""

from __future__ import annotations

from typing import Any

from tiermoe.controller import Controller
from tiermoe.policy.allotment import Pool
from tiermoe.policy.eviction import EVICTIONS, EvictionContext
from tiermoe.policy.pools import Pools
from tiermoe.types import ExpertKey


class ExactPools(Pools):
    """Pools in which a demand is met by a copy in the very bits that it names."""

    def find(self, layer: int, expert: int, bits: int) -> ExpertKey | None:
        key = ExpertKey(layer, expert, bits)
        return key if self.slot(key) is not None else None

    def arriving(self, layer: int, expert: int, bits: int) -> ExpertKey | None:
        key = ExpertKey(layer, expert, bits)
        return key if self.in_flight(key) else None


def use_exact_precisions(engine: Any) -> None:
    """Gives a loaded model's engine an empty cache of such pools, LRU over all layers, in the slots that it has. So the
    precision of an expert can change from pass to pass while copies in several precisions stay."""
    layers = len(engine.store.layers)
    pools = [Pool(pool.slots, frozenset(pool.bits), range(layers)) for pool in engine.plan.pools]
    clock = engine.scheduler.clock
    cache = ExactPools(
        pools, lambda pool: EVICTIONS["lru"](EvictionContext(clock, pool.slots, layers)), engine.precisions
    )
    engine.scheduler.controller = Controller(cache, engine.link, max(engine.precisions))
