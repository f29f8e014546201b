"""An eviction policy."""

from __future__ import annotations

from collections.abc import Callable

from tiermoe.policy.eviction import EvictionContext
from tiermoe.types import Demand, ExpertKey


class MostRecentlyUsed:
    """Evicts the expert that was used last: of a circle that is longer than the cache, the beginning stays."""

    def __init__(self, context: EvictionContext) -> None:
        self._order: list[ExpertKey] = []

    def admitted(self, key: ExpertKey) -> None:
        self._order.append(key)

    def used(self, key: ExpertKey, demand: Demand) -> None:
        self._order.append(self._order.pop(self._order.index(key)))

    def removed(self, key: ExpertKey) -> None:
        self._order.remove(key)

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        return next((key for key in reversed(self._order) if evictable(key)), None)

    def new_sequence(self) -> None:
        """The order goes on from one sequence to the next."""
