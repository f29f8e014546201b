"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from tiermoe.offload.policies.eviction.base import EvictionContext
from tiermoe.types import Demand, ExpertKey


class LeastRecentlyUsed:
    """Evicts the expert whose last use lies furthest back."""

    def __init__(self, context: EvictionContext) -> None:
        self._order: OrderedDict[ExpertKey, None] = OrderedDict()

    def admitted(self, key: ExpertKey) -> None:
        self._order[key] = None

    def used(self, key: ExpertKey, demand: Demand) -> None:
        self._order.move_to_end(key)

    def removed(self, key: ExpertKey) -> None:
        del self._order[key]

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        return next((key for key in self._order if evictable(key)), None)

    def new_sequence(self) -> None:
        """Recency goes on from one sequence to the next."""
