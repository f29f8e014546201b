"""Slots that move between the layers, to where experts are used most.

Routing is more even in some layers than in others. With as many slots in each, layers that keep to few experts hold
some that nobody asks for while others miss. One pool for all would hold the most used experts of the model, but then
what a layer has just read is first to leave when the next layers miss: before its own layer runs again. So a layer
evicts its own, and how many slots it has follows from the uses of all layers' experts."""

from __future__ import annotations

from collections.abc import Container, Sequence

from tiermoe.decide.cache import ExpertCache
from tiermoe.types import ExpertKey

EVERY = 16
"""Tokens after which the shares are computed again: 1 ms for 6,000 experts."""


def most_used(slots: int, uses: Sequence[Sequence[float]], minimum: int) -> list[int]:
    """Slots of each layer: `minimum`, and one for each of its other experts that is among the most used of all layers,
    as far as `slots` go; of equally used ones those of all layers in turn. uses: a row of at least `minimum` experts a
    layer. The sum is less than `slots` only where every expert has one."""
    others = [sorted(row, reverse=True)[minimum:] for row in uses]
    ranked = sorted((count for row in others for count in row), reverse=True)
    left = slots - minimum * len(uses)
    if left >= len(ranked):
        return [minimum + len(row) for row in others]
    threshold = ranked[left]  # of the first that has none
    sizes = [minimum + sum(count > threshold for count in row) for row in others]
    equal = [row.count(threshold) for row in others]
    turns = [layer for turn in range(max(equal)) for layer, count in enumerate(equal) if count > turn]
    for layer in turns[: slots - sum(sizes)]:
        sizes[layer] += 1
    return sizes


class Shares:
    """The pools of one precision, one a layer, between which slots move. minimum: slots that each layer keeps."""

    def __init__(self, caches: Sequence[ExpertCache], minimum: int) -> None:
        self._caches = caches
        self._minimum = minimum
        self._wanted = [cache.slots for cache in caches]

    def follow(self, uses: Sequence[Sequence[float]]) -> None:
        """The shares are those of `uses` from now on. Free slots move at once, others when a layer misses."""
        self._wanted = most_used(sum(cache.slots for cache in self._caches), uses, self._minimum)
        free = [cache for layer, cache in enumerate(self._caches) for _ in range(min(cache.free, self._over(layer)))]
        for layer, cache in enumerate(self._caches):
            while free and self._over(layer) < 0:
                cache.take_over(free.pop().give_free())

    def enlarge(self, key: ExpertKey, protected: Container[ExpertKey]) -> None:
        """One slot more for the layer of `key`, which misses, if it has less than its share: of the layer that is
        furthest above its own and has one to give."""
        if self._over(key.layer) >= 0:
            return
        above = [layer for layer in range(len(self._caches)) if self._over(layer) > 0]
        for layer in sorted(above, key=self._over, reverse=True):
            slot = self._caches[layer].give_up(key, protected)
            if slot is not None:
                self._caches[key.layer].take_over(slot)
                return

    def _over(self, layer: int) -> int:
        return self._caches[layer].slots - self._wanted[layer]
