"""Random replacement."""

from __future__ import annotations

import random
from collections.abc import Callable

from tiermoe.offload.policies.eviction.base import EvictionContext
from tiermoe.types import Demand, ExpertKey


class RandomChoice:
    """Evicts any expert that may leave, each equally likely; the same choices for the same `context.seed`."""

    def __init__(self, context: EvictionContext) -> None:
        self._random = random.Random(context.seed)
        self._keys: list[ExpertKey] = []
        self._places: dict[ExpertKey, int] = {}

    def admitted(self, key: ExpertKey) -> None:
        self._places[key] = len(self._keys)
        self._keys.append(key)

    def used(self, key: ExpertKey, demand: Demand) -> None:
        """Uses do not count."""

    def removed(self, key: ExpertKey) -> None:
        self._swap(self._places[key], len(self._keys) - 1)
        self._keys.pop()
        del self._places[key]

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        # a shuffle (Fisher-Yates) that ends at the first that may leave: uniform among those that may
        for place in range(len(self._keys)):
            self._swap(place, self._random.randrange(place, len(self._keys)))
            if evictable(self._keys[place]):
                return self._keys[place]
        return None

    def new_sequence(self) -> None:
        """The random numbers go on."""

    def _swap(self, one: int, other: int) -> None:
        keys = self._keys
        keys[one], keys[other] = keys[other], keys[one]
        self._places[keys[one]], self._places[keys[other]] = one, other
