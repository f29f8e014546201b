"""The classic policies: who came first, was used longest ago or least, anybody, and who comes again last."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable

from tiermoe.errors import ConfigError
from tiermoe.offload.policies.eviction.base import EvictionContext, ScoredEviction
from tiermoe.types import Demand, ExpertKey


class FirstInFirstOut:
    """Evicts the expert that has held its slot for the longest time, used or not."""

    def __init__(self, context: EvictionContext) -> None:
        self._order: OrderedDict[ExpertKey, None] = OrderedDict()

    def admitted(self, key: ExpertKey) -> None:
        self._order[key] = None

    def used(self, key: ExpertKey, demand: Demand) -> None:
        """Uses do not count."""

    def removed(self, key: ExpertKey) -> None:
        del self._order[key]

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        return next(filter(evictable, self._order), None)

    def new_sequence(self) -> None:
        """The order goes on from one sequence to the next."""


class LeastRecentlyUsed(FirstInFirstOut):
    """Evicts the expert whose last use lies furthest back."""

    def used(self, key: ExpertKey, demand: Demand) -> None:
        self._order.move_to_end(key)


class LeastFrequentlyUsed(ScoredEviction):
    """Evicts the expert with the fewest uses, one for each token that it served; of those, the least recently used."""

    def __init__(self, context: EvictionContext) -> None:
        super().__init__(context)
        self._uses: Counter[ExpertKey] = Counter()

    def record(self, key: ExpertKey, demand: Demand) -> None:
        self._uses[key] += demand.tokens

    def forget(self) -> None:
        self._uses.clear()

    def score(self, key: ExpertKey) -> float:
        return self._uses[key]

    def priority(self, layer: int, score: float) -> float:
        return score


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
