"""First in, first out."""

from __future__ import annotations

from collections.abc import Callable

from tiermoe.offload.policies.eviction.base import EvictionContext
from tiermoe.types import Demand, ExpertKey


class FirstInFirstOut:
    """Evicts the expert that has held its slot for the longest time, used or not."""

    def __init__(self, context: EvictionContext) -> None:
        self._order: dict[ExpertKey, None] = {}

    def admitted(self, key: ExpertKey) -> None:
        self._order[key] = None

    def used(self, key: ExpertKey, demand: Demand) -> None:
        """Uses do not count."""

    def removed(self, key: ExpertKey) -> None:
        del self._order[key]

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        return next(filter(evictable, self._order), None)

    def new_sequence(self) -> None:
        """The order of arrival goes on."""
