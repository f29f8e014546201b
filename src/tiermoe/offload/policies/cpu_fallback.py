"""Which of a layer's misses the CPU computes while the link loads the rest, by what each way has taken (HOBBIT,
section 4, and Fiddler)."""

from __future__ import annotations

from typing import NamedTuple

_NEWEST = 0.1  # weight of the newest time in an average


class MissCosts(NamedTuple):
    """Seconds of one missing expert, as measured so far; None: not yet."""

    load_s: float | None  # loaded over the link
    cpu_s: float | None  # computed on the CPU


def averaged(average: float | None, seconds: float) -> float:
    """The average with one more time, in which the last ten or so count. average: None before the first time."""
    return seconds if average is None else average + (seconds - average) * _NEWEST


def misses_on_cpu(misses: int, costs: MissCosts) -> int:
    """How many of `misses` experts the CPU computes, so that both ways, side by side, end soonest; of equal numbers
    the least. A way that has not been measured gets one expert."""
    load_s, cpu_s = costs
    if cpu_s is None:
        return min(misses, 1)
    if load_s is None:
        return max(0, misses - 1)
    return min(range(misses + 1), key=lambda on_cpu: max((misses - on_cpu) * load_s, on_cpu * cpu_s))
