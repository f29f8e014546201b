"""Belady's optimal replacement, for replays."""

from __future__ import annotations

from collections.abc import Callable

from tiermoe.errors import ConfigError
from tiermoe.offload.policies.eviction.base import EvictionContext
from tiermoe.offload.policies.eviction.lru import LeastRecentlyUsed
from tiermoe.types import ExpertKey


class Belady(LeastRecentlyUsed):
    """Evicts the expert that is asked for again last; of those never asked for again, the least recently used. No
    policy has more hits in one pool of equal units without prefetch. ConfigError without `context.next_use`."""

    def __init__(self, context: EvictionContext) -> None:
        if context.next_use is None:
            raise ConfigError(
                "cache=belady needs to know every later request, which only a replay does; "
                "run it with `tiermoe simulate`, or choose another cache (lru, arc, weighted, …)"
            )
        super().__init__(context)
        self._next_use = context.next_use

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        return max(filter(evictable, self._order), key=self._next_use, default=None)
