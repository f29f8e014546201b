"""Uses that may turn out not to have happened: those of a pass that is discarded (MoBiLE)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from tiermoe.decide.eviction.protocol import Eviction, EvictionContext
from tiermoe.types import Demand, ExpertKey


class Undoable:
    """The eviction policy `policy`, made from `context`, whose uses since `begin` can be taken back. What has come and
    left meanwhile stays so: the policy is what it would be had nobody used it."""

    def __init__(self, policy: Eviction, context: EvictionContext) -> None:
        self._policy = policy
        self._shared = {id(each): each for each in (context, *(getattr(context, one.name) for one in fields(context)))}
        self._before: Eviction | None = None
        self._since: list[Callable[[Eviction], Any]] = []

    def begin(self) -> None:
        """What is used from now on may be taken back."""
        self._before = copy.deepcopy(self._policy, dict(self._shared))
        self._since.clear()

    def keep(self) -> None:
        """What has been used was used."""
        self._before = None
        self._since.clear()

    def undo(self) -> None:
        """Nothing was used since `begin`."""
        if self._before is not None:
            self._policy = self._before
            for change in self._since:
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
        if self._before is not None and victim is not None:
            self._since.append(lambda policy: policy.victim(incoming, {victim}.__contains__))  # they learn from it
        return victim

    def new_sequence(self) -> None:
        self._change(lambda policy: policy.new_sequence())

    def _change(self, change: Callable[[Eviction], Any]) -> None:
        change(self._policy)
        if self._before is not None:
            self._since.append(change)
