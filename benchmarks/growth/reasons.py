"""Why a line bends where it does, as far as it follows from sizes and from what the runs themselves say.

A bend is named where its reason sets in, whether or not it can be seen; the exponents before and after tell. A bend
that was measured and follows from nothing here is named too, without a reason.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from benchmarks.growth.costs import Row, around, bent, exponents, line, series_of
from benchmarks.growth.points import ALL
from tiermoe.config import format_size

ROUTED = 0.99  # share of a layer's experts that a prompt's tokens use together, from which on more tokens add none
QUADRATIC = 0.1  # attention's share of the arithmetic from which on it counts


@dataclass(frozen=True)
class Bend:
    """`at` along the axis; `before` and `after`: exponents of the cost (None: no stretch is measured there). An empty
    `reason`: none is known."""

    series: str
    at: float
    reason: str
    before: float | None = None
    after: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Facts:
    """What reasons are derived from. `last_cache`: bytes; `chunk`: tokens of a prompt that run at once; `flops`: of one
    token's matrix products; `attended`: floating-point operations of attention for each position attended to;
    `kv_bytes`: keys and values of one token; None: not known."""

    last_cache: int | None
    chunk: int
    flops: float | None = None
    attended: float | None = None
    kv_bytes: int | None = None


Named = Iterator[tuple[float, str]]


def bends(over: str, rows: Sequence[Row], facts: Facts) -> list[Bend]:
    """Of every line along an axis, within what was measured."""
    rules: dict[str, Callable[[Sequence[Row], Facts], Named]] = {
        "budget": _budget, "experts": _models, "layers": _models, "prompt": _prompt,
    }  # fmt: skip
    found = []
    for series in series_of(rows):
        points = line(rows, series)
        if len(points) < 2:
            continue
        low, high = points[0]["x"], points[-1]["x"]
        known = sorted((at, reason) for at, reason in rules[over](points, facts) if low <= at <= high)
        found += [Bend(series, at, reason, *around(points, at)) for at, reason in known]
        found += [_unknown(points, row, series) for row in bent(points) if not _explained(points, row, known)]
    return found


def _explained(points: Sequence[Row], row: Row, known: Sequence[tuple[float, str]]) -> bool:
    """Whether a reason lies no further than a neighbouring point."""
    xs = [each["x"] for each in points]
    at = xs.index(row["x"])
    return any(xs[at - 1] <= where <= xs[at + 1] for where, _ in known)


def _unknown(points: Sequence[Row], row: Row, series: str) -> Bend:
    return Bend(series, row["x"], "", *around(points, row["x"]))


def summary(over: str, rows: Sequence[Row]) -> list[str]:
    """One sentence a line: how its cost grows from end to end, and hits beside the share cached."""
    found = []
    for series in series_of(rows):
        points = line(rows, series)
        if len(points) > 1:
            found.append(f"{series}: exponents {', '.join(f'{each:.2f}' for each in exponents(points))}")
    if over == "experts":
        found.append(
            "the experts that a token uses are as many whatever there are: with all of them cached only the routers "
            "grow, by one row each"
        )
    if over == "layers":
        found.append("every layer costs the same, embedding and output matrix are paid once: below 1 at few layers")
    return found


def _models(points: Sequence[Row], facts: Facts) -> Named:
    """Of lines over models that grow along one of two sizes."""
    first, last = points[0], points[-1]
    grows = "experts" if first["experts"] != last["experts"] else "layers"
    same = "layers" if grows == "experts" else "experts"
    if first["series"].startswith(ALL):
        if facts.last_cache and first["slot_bytes"]:
            size = format_size(facts.last_cache)
            yield (
                facts.last_cache / (first["slot_bytes"] * first[same]),
                f"the packed experts outgrow the last cache ({size}): memory's bandwidth counts from here on",
            )
        return
    if first["cache"] == first["layers"] * first["experts"]:
        yield first["cache"] / first[same], f"more experts than the {first['cache']} that are cached: misses begin"
    if grows == "layers" and first["cache"] == last["cache"]:
        yield first["cache"] / first["top_k"], _token_outgrows()
    yield from _drive(points, rising=True)


def _budget(points: Sequence[Row], facts: Facts) -> Named:
    """Of a line over caches, in experts."""
    first = points[0]
    yield first["layers"] * first["experts"], "all experts fit: below this, misses begin"
    yield first["layers"] * first["top_k"], _token_outgrows()
    yield from _drive(points, rising=False)
    waits = [row["x"] for row in points if _waits(row)]
    if waits and waits[-1] != points[-1]["x"]:
        yield waits[-1], "measured: here and below, more of a token is waiting for experts than computing"


def _waits(row: Row) -> bool:
    return (row["wait_ms"] or 0) > (row["compute_ms"] or 0) + (row["framework_ms"] or 0)


def _token_outgrows() -> str:
    return (
        "the experts of one token no longer fit: in one LRU pool each has left before the next token asks for it, so "
        "its hits end; other policies keep some"
    )


def _drive(points: Sequence[Row], rising: bool) -> Named:
    """Where the bound passes from memory to the drive, walking towards more misses."""
    ordered = list(points if rising else reversed(points))
    for before, row in pairwise(ordered):
        if (before["limited_by"], row["limited_by"]) == ("memory", "drive"):
            yield (
                row["x"],
                "the bound passes from memory to the drive: reading what even Belady's choice misses takes longer than "
                "reading a token's weights from memory",
            )
            return


def _prompt(points: Sequence[Row], facts: Facts) -> Named:
    """Of a line over lengths of prompts."""
    first = points[0]
    if first["top_k"] < first["experts"]:
        used = math.log(1 - ROUTED) / math.log(1 - first["top_k"] / first["experts"])
        yield (
            used,
            f"with even routing {ROUTED:.0%} of a layer's experts are used from here on: their weights are read once a "
            f"chunk, so more tokens cost arithmetic alone",
        )
    cached = first["cache"] == first["layers"] * first["experts"]
    if not cached:
        yield (
            facts.chunk,
            f"prompts run in chunks of {facts.chunk} tokens: each further one reads what is not cached again",
        )
    if facts.flops and facts.attended:
        tokens = 2 * QUADRATIC / (1 - QUADRATIC) * facts.flops / facts.attended
        yield tokens, f"attention, which grows with the square, is {QUADRATIC:.0%} of the arithmetic"
    if facts.kv_bytes and facts.last_cache:
        size = format_size(facts.last_cache)
        yield facts.last_cache / facts.kv_bytes, f"keys and values of all layers outgrow the last cache ({size})"
