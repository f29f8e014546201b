"""What became of the experts that tokens were routed to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """What happened so far, of experts that tokens were routed to. `hits` were there, in a precision that satisfies the
    demand, when the router asked, `prefetched` of them by a prefetch; `misses` were not (also where a prefetch was
    still on its way), `elsewhere` of them yielded to be computed elsewhere; `skipped` were neither there nor worth a
    load. `low_loads`: loads below the highest precision. `warmed`: experts that the background has
    brought. `displaced`: choices that fell on an expert that was here instead of the router's, with `moved_weight`, the
    shares of a token's gate weight that were moved with them, summed over tokens and layers (routing=cached)."""

    hits: int = 0
    prefetched: int = 0
    misses: int = 0
    elsewhere: int = 0
    skipped: int = 0
    loads: int = 0
    low_loads: int = 0
    speculative_loads: int = 0
    warmed: int = 0
    displaced: int = 0
    moved_weight: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        """Hits of all that was asked for and not skipped; None where nothing was."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None

    def copy(self) -> Counts:
        return dataclasses.replace(self)

    def minus(self, earlier: Counts) -> Counts:
        """What has happened since `earlier`."""
        names = [field.name for field in dataclasses.fields(self)]
        return Counts(**{name: getattr(self, name) - getattr(earlier, name) for name in names})

    def add(self, other: Counts) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
