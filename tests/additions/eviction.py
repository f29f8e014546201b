"""An eviction policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tiermoe.offload.policies.eviction import EvictionContext
from tiermoe.offload.policies.settings import setting
from tiermoe.types import Demand, ExpertKey


@dataclass(eq=False)
class MostRecentlyUsed:
    """Evicts the expert that was used last but `spared`: of a circle that is longer than the cache, the beginning
    stays."""

    context: EvictionContext
    spared: int = setting(0, read=int, low=0, high=64)

    def __post_init__(self) -> None:
        self._order: list[ExpertKey] = []

    def admitted(self, key: ExpertKey) -> None:
        self._order.append(key)

    def used(self, key: ExpertKey, demand: Demand) -> None:
        self._order.append(self._order.pop(self._order.index(key)))

    def removed(self, key: ExpertKey) -> None:
        self._order.remove(key)

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        latest = [key for key in reversed(self._order) if evictable(key)]
        return next(iter(latest[self.spared :] or latest), None)

    def new_sequence(self) -> None:
        """The order goes on from one sequence to the next."""
