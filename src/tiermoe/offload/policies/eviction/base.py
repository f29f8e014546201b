"""Eviction: the interface of every policy, what policies are made from, the frame of those that rank by a score, and
uses that can be undone."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol

from tiermoe.types import Demand, ExpertKey, Routed

NextUse = Callable[[ExpertKey], float]
"""Key → how far ahead its next use lies, in any unit; infinity for a key that is never used again (replay only)."""


class Eviction(Protocol):
    """The eviction policy of one pool of slots: it sees admissions, uses and removals, and names victims.

    A class that is a dataclass may declare settings (`policies.settings`). It may say `spans_precisions`: one instance
    serves the pools of all precisions, since a use of an expert counts for each of its copies; `forgets`: it reads
    `EvictionContext.per_sequence` (records=sequence); `reads_weights`: `routed` is called with each layer's choices and
    gate weights before anybody leaves for them; and `reads_table`: the calibrated table without which it cannot be
    made. One with `initial_experts` is told the experts of its layers, and names what the cache begins with."""

    def admitted(self, key: ExpertKey) -> None:
        """`key` has taken a slot; its load has begun."""

    def used(self, key: ExpertKey, demand: Demand) -> None:
        """The running layer computes with `key` for `demand`."""

    def removed(self, key: ExpertKey) -> None:
        """`key` has lost its slot."""

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        """The key to evict for `incoming`, among those that `evictable` admits; None if it admits none."""

    def new_sequence(self) -> None:
        """Another request begins."""


@dataclass(slots=True)
class Clock:
    """Where the model is, as recency, frequency and distance are measured. The scheduler alone writes it."""

    layer: int = 0  # the running MoE layer
    token: int = 0  # tokens of this sequence so far, the running ones included
    running: int = 1  # tokens of the running pass
    sequence: int = 0  # sequences begun so far

    def advance(self, tokens: int, counted: bool = True) -> None:
        """A forward pass over `tokens` tokens begins, or goes on, its tokens not counted again."""
        self.token += tokens if counted else 0
        self.running = tokens
        self.layer = 0

    def new_sequence(self) -> None:
        self.token = 0
        self.layer = 0
        self.sequence += 1


@dataclass(slots=True)
class Popularity:
    """The share of all tokens that each expert served, in this run and the ones before. The scheduler alone writes
    it."""

    shares: Sequence[Sequence[float]] = ()  # a row of experts for each layer; empty: not known yet


@dataclass(frozen=True, slots=True)
class EvictionContext:
    """What a policy may be made from."""

    clock: Clock
    slots: int  # of the policy's pool
    layers: int  # MoE layers of the model
    room: int = 0  # slots besides for what is fetched, until its layer has run (`Composition.room`)
    encoder_layers: int = 0  # the first of them, in an encoder
    high_bits: int = 4  # the precision whose uses count as high
    per_sequence: bool = False  # a new sequence forgets all records
    next_use: NextUse | None = None  # known in a replay alone
    seed: int = 0  # of random choices
    popularity: Popularity = field(default_factory=Popularity)
    # (layer, expert) → share or number of the calibration's tokens
    frequencies: Mapping[tuple[int, int], float] = field(default_factory=dict)


class ScoredEviction(ABC):
    """Evicts the key of the lowest priority.

    A subclass says what it records of a use, how records make the score of a key, and how the running layer turns a
    score into a priority. Records belong to an expert and outlive its stay in the cache; with `context.per_sequence` a
    new sequence forgets them.

    Each layer has a row of its keys, sorted by score, then by the last touch (admission or use). The clock changes the
    priorities of one layer's keys alike, so rows stay sorted while it moves, and finding the victim takes the first
    evictable key of each row.
    """

    forgets: ClassVar[bool] = True

    def __init__(self, context: EvictionContext) -> None:
        self._per_sequence = context.per_sequence
        self._rows: dict[int, list[tuple[float, int, ExpertKey]]] = {}  # layer → (score, last touch, key), sorted
        self._entries: dict[ExpertKey, tuple[float, int, ExpertKey]] = {}  # every key's entry in its row
        self._touches = 0

    @abstractmethod
    def record(self, key: ExpertKey, demand: Demand) -> None:
        """Notes a use."""

    @abstractmethod
    def forget(self) -> None:
        """Drops the records of all keys."""

    @abstractmethod
    def score(self, key: ExpertKey) -> float:
        """What the records of `key` say of it; the higher, the later it leaves."""

    @abstractmethod
    def priority(self, layer: int, score: float) -> float:
        """Of a key of `layer` with `score`, now; the lowest leaves. Must not fall as `score` grows."""

    def admitted(self, key: ExpertKey) -> None:
        self._touches += 1
        self._rank(key, self._touches)

    def used(self, key: ExpertKey, demand: Demand) -> None:
        self.record(key, demand)
        row = self._rows[key.layer]
        del row[bisect_left(row, self._entries[key])]
        self._touches += 1
        entry = self._entries[key] = (self.score(key), self._touches, key)
        insort(row, entry)

    def removed(self, key: ExpertKey) -> None:
        self._unrank(key)

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        """Of equal priorities the key with the lower score, then the least recently touched."""
        lowest: tuple[float, tuple[float, int, ExpertKey]] | None = None
        for layer, row in self._rows.items():
            for entry in row:
                if evictable(entry[2]):
                    candidate = (self.priority(layer, entry[0]), entry)
                    if lowest is None or candidate < lowest:
                        lowest = candidate
                    break
        return None if lowest is None else lowest[1][2]

    def new_sequence(self) -> None:
        if self._per_sequence:
            self.forget()
            for key in list(self._entries):
                self.rescore(key)

    def rescore(self, key: ExpertKey) -> None:
        """Ranks a cached key by its score of now; its last touch stays."""
        touch = self._entries[key][1]
        self._unrank(key)
        self._rank(key, touch)

    def _rank(self, key: ExpertKey, touch: int) -> None:
        entry = self._entries[key] = (self.score(key), touch, key)
        insort(self._rows.setdefault(key.layer, []), entry)

    def _unrank(self, key: ExpertKey) -> None:
        row, entry = self._rows[key.layer], self._entries.pop(key)
        del row[bisect_left(row, entry)]


class Undoable:
    """An eviction policy whose uses since `start` can be undone. Admissions and removals meanwhile stay: after `undo`
    the policy is what it would be had nobody used anything.

    context: what `policy` was made from; snapshots share it."""

    def __init__(self, policy: Eviction, context: EvictionContext) -> None:
        self._policy = policy
        self._shared = {id(each): each for each in (context, *(getattr(context, one.name) for one in fields(context)))}
        self._snapshot: Eviction | None = None  # of the policy at `start`
        self._changes: list[Callable[[Eviction], Any]] = []  # since then, all but uses

    def start(self) -> None:
        """Uses from now on may be undone."""
        self._snapshot = copy.deepcopy(self._policy, dict(self._shared))
        self._changes.clear()

    def keep(self) -> None:
        """Uses since `start` count for good."""
        self._snapshot = None
        self._changes.clear()

    def undo(self) -> None:
        """Uses since `start` do not count."""
        if self._snapshot is not None:
            self._policy = self._snapshot
            for change in self._changes:
                change(self._policy)
        self.keep()

    def admitted(self, key: ExpertKey) -> None:
        self._change(lambda policy: policy.admitted(key))

    def used(self, key: ExpertKey, demand: Demand) -> None:
        self._policy.used(key, demand)

    def routed(self, routed: Routed) -> None:
        self._policy.routed(routed)  # type: ignore[attr-defined]

    def removed(self, key: ExpertKey) -> None:
        self._change(lambda policy: policy.removed(key))

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        victim = self._policy.victim(incoming, evictable)
        if self._snapshot is not None and victim is not None:
            # policies learn from naming a victim
            self._changes.append(lambda policy: policy.victim(incoming, {victim}.__contains__))
        return victim

    def new_sequence(self) -> None:
        self._change(lambda policy: policy.new_sequence())

    def _change(self, change: Callable[[Eviction], Any]) -> None:
        change(self._policy)
        if self._snapshot is not None:
            self._changes.append(change)
