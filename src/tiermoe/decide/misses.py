"""Which of a layer's misses another processor computes while the link brings the rest, by what each has taken (the
CPU's part in HOBBIT, section 4, and Fiddler)."""

from __future__ import annotations

from typing import NamedTuple

_NEWEST = 0.1  # weight of the newest time in an average


class MissCosts(NamedTuple):
    """Seconds that one expert takes, as measured so far: brought by the link, and computed elsewhere. None: not yet."""

    load_s: float | None
    elsewhere_s: float | None


def averaged(average: float | None, seconds: float) -> float:
    """The average with one more time, in which the last ten or so count."""
    return seconds if average is None else average + (seconds - average) * _NEWEST


def computed_elsewhere(misses: int, costs: MissCosts) -> int:
    """How many of so many misses are computed elsewhere, so that both ways, side by side, end soonest; of equal ones
    the fewest. What has not been measured is tried with one expert."""
    if costs.elsewhere_s is None or costs.load_s is None:
        return min(misses, 1) if costs.elsewhere_s is None else max(0, misses - 1)
    load_s, elsewhere_s = costs.load_s, costs.elsewhere_s
    return min(range(misses + 1), key=lambda away: max((misses - away) * load_s, away * elsewhere_s))
