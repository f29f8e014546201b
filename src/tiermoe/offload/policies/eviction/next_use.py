"""Eviction by an estimate of the next use, from how often an expert is used lately, for long, and in earlier runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import ClassVar

from tiermoe.offload.policies.eviction.base import EvictionContext
from tiermoe.types import Demand, ExpertKey

_LATELY, _LONGER = 0.5 ** (1 / 2), 0.5 ** (1 / 32)  # what a use counts for one token later: half after 2, after 32
_WEIGHTS = 0.1, 0.9, 0.3  # of the rates: lately, longer, all runs
_NEVER = 1e-4  # uses a token of an expert without records


class EstimatedNextUse:
    """Evicts the expert whose next use is estimated to lie furthest ahead: 1 / rate tokens, and the part of a token
    until its layer runs again. Of equal estimates the key that was admitted first leaves.

    rate = .1 lately + .9 longer + .3 all runs, uses a token. The first two are decayed counts of this run (LRFU, Lee
    and others, 2001), of which half is left after 2 and after 32 tokens; the last is `context.popularity`. A use by
    some of a pass's tokens counts as their share of the pass.

    Keys are ranked once for all misses of a layer, since a use comes after them; what is admitted meanwhile is last."""

    forgets: ClassVar[bool] = True
    spans_precisions: ClassVar[bool] = True

    def __init__(self, context: EvictionContext) -> None:
        self._clock = context.clock
        self._layers = context.layers
        self._popularity = context.popularity
        self._per_sequence = context.per_sequence
        self._keys: dict[ExpertKey, None] = {}  # that have a slot, in the order of their admission
        self._records: dict[tuple[int, int], _Record] = {}  # of (layer, expert); they outlive its stay in the cache
        self._earlier_tokens = 0  # of sequences before this one
        self._seen_tokens = 0  # of this one, up to the last use
        self._ranking: list[ExpertKey] = []  # all keys, the next to leave first
        self._ranked_at: tuple[int, int] | None = None  # token and layer; None: a use has changed an estimate since

    def admitted(self, key: ExpertKey) -> None:
        self._keys[key] = None
        self._ranking.append(key)

    def used(self, key: ExpertKey, demand: Demand) -> None:
        self._ranked_at = None
        clock = self._clock
        self._seen_tokens = clock.token
        now, passed = self._earlier_tokens + clock.token, clock.running
        share = demand.tokens / passed
        record = self._records.get(key[:2])
        if record is None:
            record = self._records[key[:2]] = _Record(now)
        since = now - record.token
        record.lately = record.lately * _LATELY**since + share * (1 - _LATELY**passed)
        record.longer = record.longer * _LONGER**since + share * (1 - _LONGER**passed)
        record.token = now

    def removed(self, key: ExpertKey) -> None:
        del self._keys[key]
        if self._ranked_at is not None:
            self._ranking.remove(key)

    def victim(self, incoming: ExpertKey, evictable: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        now = self._earlier_tokens + self._clock.token, self._clock.layer
        if self._ranked_at != now:
            self._ranked_at = now
            self._rank(*now)
        return next(filter(evictable, self._ranking), None)

    def new_sequence(self) -> None:
        self._earlier_tokens += self._seen_tokens
        self._seen_tokens = 0
        self._ranked_at = None
        if self._per_sequence:
            self._records.clear()

    def _rank(self, token: int, running: int) -> None:
        """Ranks all keys by the tokens until their next use, the most first."""
        lately, longer, always = _WEIGHTS
        shares, records, layers = self._popularity.shares, self._records, self._layers
        distances = []
        for place, key in enumerate(self._keys):
            layer, expert, _ = key
            rate = always * shares[layer][expert] if shares else 0.0
            record = records.get((layer, expert))
            if record is not None:
                since = token - record.token
                rate += lately * record.lately * _LATELY**since + longer * record.longer * _LONGER**since
            distance = (layer - running - 1) % layers / layers
            distances.append((-distance - 1 / max(rate, _NEVER), place, key))
        distances.sort()
        self._ranking = list(map(itemgetter(2), distances))


@dataclass(slots=True)
class _Record:
    """Decayed uses a token of an expert, as of the last one."""

    token: int  # of the last use
    lately: float = 0.0
    longer: float = 0.0
