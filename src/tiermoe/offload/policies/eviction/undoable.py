"""Uses that may turn out not to have happened: those of a pass that is discarded (MoBiLE)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from tiermoe.offload.policies.eviction.base import Eviction, EvictionContext
from tiermoe.types import Demand, ExpertKey


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
