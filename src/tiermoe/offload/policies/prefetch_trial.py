"""Trial of prefetching: whether it pays on this machine, decided from the time of decode passes.

An expert that is read ahead and needed saves a wait. But reading, checking and asking routers take the processor's
time, and a wrong prediction delays the read that is needed. Which is more depends on cores to spare, drive and model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import fmean, median

STRETCH = 8  # passes one way: most of them find a cache that shows that way, and the next stretch the same machine
LEAD = 8  # stretches of the way that is assumed: the first answer pays for no trial
KEPT = 16  # stretches of the better way for one of the other: asking again costs at most a 17th of the difference
PAIRS = 4  # comparisons that decide by their median: one stretch that something else disturbed does not


def promising(layer_s: float, load_s: float, spare: bool) -> bool:
    """Whether reading ahead can be expected to save time: an expert comes (`load_s`) while a layer is computed
    (`layer_s`), and there are processors to `spare` that compute nothing."""
    return spare and load_s <= layer_s


class PrefetchTrial:
    """Runs decode passes in stretches with prefetching on or off, and keeps the faster way.

    In the first stretch, if that is off, predictions are compared with what routers then choose, and nothing is read
    for them (`watching`). Where less than half of what they would have read was needed, prefetching stays off and is
    not tried; one stretch in 17 watches again.

    Else the trial begins with `LEAD` stretches of the assumed way. Then it alternates until `PAIRS` neighbouring
    stretches of different ways are compared, so that a steady change (a cache that fills) favours neither way. It goes
    on comparing the way that it keeps. A tie is off, which reads less.

    found: the result of an earlier run, None without one. promises: in that case called after the first stretch, which
    is off, with the seconds of computing a layer: whether to assume on; None: off is assumed."""

    def __init__(self, found: bool | None = None, promises: Callable[[float], bool] | None = None) -> None:
        self.on = bool(found)  # whether the next pass prefetches
        self._assumed = self.on
        self._promises = promises if found is None else None
        self._passes: list[float] = []  # seconds a token, of the running stretch
        self._layers: list[float] = []  # seconds of computing a layer, of the running stretch
        self._ended = 0
        self._named = self._needed = 0  # experts, in a watched stretch
        self._useless: float | None = None  # share that was needed, if that was too little
        self._decided: int | None = None  # after so many stretches
        self._last: tuple[bool, float] | None = None
        self._pairs: deque[tuple[float, float]] = deque(maxlen=PAIRS)  # with prefetching, without

    def record(self, seconds: float, layer_s: float = 0.0) -> None:
        """A decode pass took `seconds` a token, and `layer_s` a layer without the waits for experts."""
        self._passes.append(seconds)
        self._layers.append(layer_s)
        if len(self._passes) == STRETCH:
            self._end_stretch(fmean(self._passes[1:]))  # in the first one the cache still shows the other way
            self._passes.clear()
            self._layers.clear()

    @property
    def watching(self) -> bool:
        """Whether the next pass tells `record_named` what it would have read ahead."""
        again = self._useless is not None and self._ended % (KEPT + 1) == 0
        return not self.on and (self._ended == 0 or again)

    def record_named(self, named: int, needed: int) -> None:
        """In a watched pass, so many absent experts of a layer were named before it ran, of which its router chose
        `needed`."""
        self._named += named
        self._needed += needed

    @property
    def pays(self) -> bool | None:
        """Whether passes are faster with prefetching; None before that is known."""
        if self._useless is not None:
            return False
        return None if len(self._pairs) < PAIRS else self._more() < 0

    @property
    def without_s(self) -> float | None:
        """Seconds a token without prefetching, in the last comparisons; None before the trial has ended."""
        return None if len(self._pairs) < PAIRS else median(without for _, without in self._pairs)

    @property
    def with_s(self) -> float | None:
        """Seconds a token with prefetching: those without, and the median difference of neighbouring stretches."""
        return None if (without := self.without_s) is None else without + self._more()

    def __str__(self) -> str:
        """'off (41.2 ms a token without, 48.0 with)' or 'off (6% of what it names is needed)'; empty before that is
        known."""
        if self._useless is not None:
            return f"off ({self._useless:.0%} of what it names is needed)"
        if self.with_s is None or self.without_s is None:
            return ""
        way = "on" if self.pays else "off"
        return f"{way} ({self.without_s * 1e3:.1f} ms a token without, {self.with_s * 1e3:.1f} with)"

    def _more(self) -> float:
        return median(prefetched - without for prefetched, without in self._pairs)

    def _end_stretch(self, took: float) -> None:
        last, self._last = self._last, (self.on, took)
        if last is not None and last[0] is not self.on:
            self._pairs.append((took, last[1]) if self.on else (last[1], took))
        if self.watching:
            useless = 2 * self._needed < self._named
            self._useless = self._needed / self._named if useless else None
            self._named = self._needed = 0
        self._ended += 1
        if self._promises is not None:
            self._assumed, self._promises = self._promises(median(self._layers)), None
        self.on = self._useless is None and self._next()

    def _next(self) -> bool:
        if self._ended < LEAD:
            return self._assumed
        if self.pays is None:  # two of the other way, two of the assumed one: each stretch is compared once
            return self._assumed is not ((self._ended - LEAD) % 4 < 2)
        if self._decided is None:
            self._decided = self._ended
        asks_again = (self._ended - self._decided) % (KEPT + 1) == KEPT
        return self.pays is not asks_again
