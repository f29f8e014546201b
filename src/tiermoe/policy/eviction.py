"""Who leaves the cache. A policy sees uses, arrivals and removals, and names victims; it holds no weights.

`EVICTIONS` is the one table of names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from tiermoe.types import ExpertKey


class Eviction(Protocol):
    """The seam that every eviction policy fills."""

    def admitted(self, key: ExpertKey) -> None:
        """`key` has taken a slot (its load has begun)."""

    def used(self, key: ExpertKey) -> None:
        """`key` is computed with by the running layer."""

    def removed(self, key: ExpertKey) -> None:
        """`key` has lost its slot."""

    def victim(self, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        """The first key to give up among those that `evictable` admits; None where there is none."""


class LeastRecentlyUsed:
    """Evicts the expert whose last use lies furthest back."""

    def __init__(self) -> None:
        self._order: OrderedDict[ExpertKey, None] = OrderedDict()

    def admitted(self, key: ExpertKey) -> None:
        self._order[key] = None

    def used(self, key: ExpertKey) -> None:
        self._order.move_to_end(key)

    def removed(self, key: ExpertKey) -> None:
        del self._order[key]

    def victim(self, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        return next((key for key in self._order if evictable(key)), None)


EVICTIONS: dict[str, Callable[[], Eviction]] = {"lru": LeastRecentlyUsed}
