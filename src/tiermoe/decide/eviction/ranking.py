"""What the policies with a score share: resident keys by layer, in the order of a worth."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import ClassVar

from tiermoe.decide.eviction.protocol import EvictionContext
from tiermoe.types import Demand, ExpertKey

_Entry = tuple[float, int, ExpertKey]


class Ranking:
    """Keys, each with a worth; of equal worth, the least recently touched comes first.

    What depends on the running layer is the same for all keys of one layer, so a row per layer stays sorted while the
    clock moves on, and finding the lowest score looks at one key a layer instead of at all of them.
    """

    def __init__(self) -> None:
        self._rows: dict[int, list[_Entry]] = {}
        self._entries: dict[ExpertKey, _Entry] = {}
        self._touches = 0

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._entries

    def touch(self, key: ExpertKey, worth: float) -> None:
        """Adds `key`, or changes its worth; it is the most recent one now."""
        if key in self._entries:
            self.remove(key)
        self._touches += 1
        self._insert((worth, self._touches, key))

    def change(self, key: ExpertKey, worth: float) -> None:
        """Changes the worth of a key that is not used now."""
        touch = self._entries[key][1]
        self.remove(key)
        self._insert((worth, touch, key))

    def change_all(self, worth: Callable[[ExpertKey], float]) -> None:
        for key in list(self._entries):
            self.change(key, worth(key))

    def remove(self, key: ExpertKey) -> None:
        entry = self._entries.pop(key)
        row = self._rows[key.layer]
        del row[bisect_left(row, entry)]

    def lowest(self, score: Callable[[int, float], float], evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        """The evictable key of the lowest `score(layer, worth)`, which must not fall as the worth grows; ties go by
        worth, then to the least recently touched."""
        lowest: tuple[float, _Entry] | None = None
        for layer, row in self._rows.items():
            for entry in row:
                if evictable(entry[2]):
                    candidate = (score(layer, entry[0]), entry)
                    if lowest is None or candidate < lowest:
                        lowest = candidate
                    break
        return None if lowest is None else lowest[1][2]

    def _insert(self, entry: _Entry) -> None:
        key = entry[2]
        self._entries[key] = entry
        insort(self._rows.setdefault(key.layer, []), entry)


class Scored(ABC):
    """Evicts the key of the lowest score. A policy says what it records of uses, what a key is worth by its record
    alone, and how the running layer turns that into a score. Records outlive a stay in the cache: they are of the
    expert. With `context.per_sequence` they are forgotten at each new sequence."""

    forgets: ClassVar[bool] = True

    def __init__(self, context: EvictionContext) -> None:
        self._per_sequence = context.per_sequence
        self._ranking = Ranking()

    def admitted(self, key: ExpertKey) -> None:
        self._ranking.touch(key, self.worth(key))

    def used(self, key: ExpertKey, demand: Demand) -> None:
        self.record(key, demand)
        self._ranking.touch(key, self.worth(key))

    def removed(self, key: ExpertKey) -> None:
        self._ranking.remove(key)

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        return self._ranking.lowest(self.score, evictable)

    def new_sequence(self) -> None:
        if self._per_sequence:
            self.forget()
            self._ranking.change_all(self.worth)

    @abstractmethod
    def record(self, key: ExpertKey, demand: Demand) -> None:
        """Notes a use."""

    @abstractmethod
    def forget(self) -> None:
        """Drops what was recorded of every key."""

    @abstractmethod
    def worth(self, key: ExpertKey) -> float:
        """From the records of `key` alone; the more, the later it leaves."""

    @abstractmethod
    def score(self, layer: int, worth: float) -> float:
        """Of a key of `layer` now; the lowest leaves. Must not fall as `worth` grows."""
