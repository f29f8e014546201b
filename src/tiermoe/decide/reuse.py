"""What a cache of another size would hit: how many other experts of its layer were used since an expert's last use.

An LRU cache that gives each layer c slots hits the uses with fewer than c others between them, whatever c is, so one
list a layer stands for caches of all sizes (Mattson and others, 1970). What another policy or a prefetch hits beside it
is a factor, measured at the size that ran."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from tiermoe.types import Demand

WATCHED = 8
"""Layers, spread evenly, that are watched: a use takes half a microsecond."""


class Reuse:
    """Follows the experts of decoded tokens. experts: how many each layer has. `distances[d]`: uses with d others of
    the layer since the last one; `first`: uses of experts that had not been used."""

    def __init__(self, experts: Sequence[int]) -> None:
        count = min(len(experts), WATCHED)
        self._recent: dict[int, list[int]] = {index * len(experts) // count: [] for index in range(count)}
        self.distances = [0] * max(experts)
        self.first = 0

    def note(self, layer: int, demands: Sequence[Demand], phase: str) -> None:
        """The router of a layer has spoken. A prompt's experts are used, and counted nowhere."""
        recent = self._recent.get(layer)
        if recent is None:
            return
        if phase == "decode":
            for demand in demands:  # before any of them moves: a token's experts are asked for at once
                self._count(recent, demand.expert)
        for demand in demands:
            with contextlib.suppress(ValueError):
                recent.remove(demand.expert)
            recent.insert(0, demand.expert)

    def _count(self, recent: list[int], expert: int) -> None:
        try:
            self.distances[recent.index(expert)] += 1
        except ValueError:
            self.first += 1


def missed(distances: Sequence[float], first: float, slots: float) -> float:
    """Share of the decoded tokens' uses that an LRU cache of `slots` slots a layer misses, by what `Reuse` has counted;
    0 where there are none. Between two whole numbers of slots in proportion."""
    total = sum(distances) + first
    whole = min(int(slots), len(distances))
    hits = sum(distances[:whole])
    if whole < len(distances):
        hits += (slots - whole) * distances[whole]
    return 1 - hits / total if total else 0.0


@dataclass(frozen=True, slots=True)
class SizeCurve:
    """What a run with a cache of `slots` slots for `layers` layers says of other sizes. `distances`, `first`: as
    `Reuse` has counted them. `miss_rate`: of the experts that were asked for. `compute_s`, `wait_s`: seconds of a
    decoded token."""

    distances: tuple[float, ...]
    first: float
    slots: int
    layers: int
    miss_rate: float
    compute_s: float
    wait_s: float

    def at(self, slots: int) -> tuple[float, float]:
        """(hit rate, decoded tokens a second) with so many slots: waiting goes as misses, and these as an LRU
        cache's."""
        ours = missed(self.distances, self.first, self.slots / self.layers)
        factor = self.miss_rate / ours if ours else 1.0
        rate = min(1.0, factor * missed(self.distances, self.first, slots / self.layers))
        return 1 - rate, 1 / (self.compute_s + self.wait_s * rate / self.miss_rate)
