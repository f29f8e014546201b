"""Adaptive replacement cache (Megiddo and Modha, FAST 2003); Fate's policy within a layer (section 4.4)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain

from tiermoe.offload.policies.eviction.base import EvictionContext
from tiermoe.types import Demand, ExpertKey

_List = OrderedDict[ExpertKey, None]  # least recently used first


class AdaptiveReplacement:
    """ARC over the c slots of a pool. |T1| + |B1| <= c, and at most 2c keys in all four lists.

    ARC's request is the first use after an admission. Until then a key is in transit: its admission settles to which
    list the key will go and by how much p will change. Keys in transit leave before all others and leave no ghost. For
    requests one at a time this is ARC exactly. A pool may have more slots than c for a while (`SlotShares`): then there
    may be no ghost to forget.
    """

    def __init__(self, context: EvictionContext) -> None:
        self._slots = context.slots  # c
        self._p = 0.0  # the size that T1 should have
        self._t1, self._t2 = _List(), _List()  # cached keys: requested once lately, and more often
        self._b1, self._b2 = _List(), _List()  # ghosts of keys that left T1 and T2
        self._transit: dict[ExpertKey, float] = {}  # admitted and not used yet → what the first use adds to p
        self._settled: float | None = None  # the same of the key that the last victim made room for

    def admitted(self, key: ExpertKey) -> None:
        # a victim that made room is a ghost by now, so `victim` has settled the change before
        self._transit[key] = self._change(key) if self._settled is None else self._settled
        self._settled = None

    def used(self, key: ExpertKey, demand: Demand) -> None:
        if key in self._transit:
            self._requested(key, self._transit.pop(key))
        elif key in self._t2:
            self._t2.move_to_end(key)
        else:
            del self._t1[key]
            self._t2[key] = None

    def removed(self, key: ExpertKey) -> None:
        if key in self._transit:
            del self._transit[key]
        elif key in self._t1:
            del self._t1[key]
            self._b1[key] = None
        else:
            del self._t2[key]
            self._b2[key] = None

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        change = self._change(incoming)
        victim = next(filter(evictable, self._leaving(change)), None)
        self._settled = None if victim is None else change
        return victim

    def new_sequence(self) -> None:
        """ARC's lists go on from one sequence to the next."""

    def _leaving(self, change: float) -> Iterator[ExpertKey]:
        """The order of leaving for a key that changes p by `change` (REPLACE): p decides between T1 and T2."""
        p, size = self._adapted(change), len(self._t1)
        from_t1 = size > p or (size == p and change < 0)
        return chain(self._transit, *((self._t1, self._t2) if from_t1 else (self._t2, self._t1)))

    def _requested(self, key: ExpertKey, change: float) -> None:
        """The first use of a key in transit (the end of cases II, III and IV)."""
        if change:
            self._p = self._adapted(change)
            self._b1.pop(key, None)
            self._b2.pop(key, None)
            self._t2[key] = None
        else:
            self._t1[key] = None
        if self._b1 and len(self._t1) + len(self._b1) > self._slots:
            self._b1.popitem(last=False)
        if self._b2 and len(self._t1) + len(self._t2) + len(self._b1) + len(self._b2) > 2 * self._slots:
            self._b2.popitem(last=False)

    def _change(self, key: ExpertKey) -> float:
        """What a request for `key` adds to p: at least 1 for a ghost of T1, at most -1 for one of T2, else 0."""
        if key in self._b1:
            return max(1.0, len(self._b2) / len(self._b1))
        if key in self._b2:
            return -max(1.0, len(self._b1) / len(self._b2))
        return 0.0

    def _adapted(self, change: float) -> float:
        return min(max(self._p + change, 0.0), float(self._slots))
