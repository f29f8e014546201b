"""What grows: seconds of a token, or of a prompt, and how steeply."""

import math
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def cost(row: Row) -> dict[str, float] | None:
    """{median, low, high} in seconds: of a decoded token, or of the whole prompt where nothing is decoded. None where
    the run gave no figures."""
    speed, tokens = (row["decode_tok_s"], 1) if row["output"] else (row["prefill_tok_s"], row["prompt"])
    if speed is None:
        return None
    return {"median": tokens / speed["median"], "low": tokens / speed["high"], "high": tokens / speed["low"]}


def line(rows: Sequence[Row], series: str) -> list[Row]:
    """The points of one line that have figures, by rising x."""
    return sorted((row for row in rows if row["series"] == series and cost(row)), key=lambda row: row["x"])


def series_of(rows: Sequence[Row]) -> list[str]:
    """The lines' names, in their order."""
    return list(dict.fromkeys(row["series"] for row in rows))


def exponents(points: Sequence[Row]) -> list[float]:
    """Between neighbours of a line: e where the cost grows as x to the power e (1: in proportion, 0: not at all)."""
    costs = [_median(row) for row in points]
    return [
        math.log(costs[at + 1] / costs[at]) / math.log(points[at + 1]["x"] / points[at]["x"])
        for at in range(len(points) - 1)
    ]


def around(points: Sequence[Row], at: float) -> tuple[float | None, float | None]:
    """The exponents before and after `at`: of the last stretch that ends at or below it, and the first that begins at
    or above it. None where there is no such stretch."""
    slopes = exponents(points)
    before = [slope for slope, row in zip(slopes, points[1:], strict=True) if row["x"] <= at]
    after = [slope for slope, row in zip(slopes, points[:-1], strict=True) if row["x"] >= at]
    return (before[-1] if before else None), (after[0] if after else None)


def bent(points: Sequence[Row], least: float = 0.5) -> list[Row]:
    """Points at which the exponent changes by `least` or more, and whose own range does not reach the straight line
    between their neighbours."""
    slopes, found = exponents(points), []
    for at in range(1, len(points) - 1):
        before, here, after = (points[at + step] for step in (-1, 0, 1))
        share = math.log(here["x"] / before["x"]) / math.log(after["x"] / before["x"])
        straight = _median(before) ** (1 - share) * _median(after) ** share
        own = cost(here)
        assert own is not None
        if abs(slopes[at] - slopes[at - 1]) >= least and not own["low"] <= straight <= own["high"]:
            found.append(here)
    return found


def _median(row: Row) -> float:
    found = cost(row)
    assert found is not None
    return found["median"]
