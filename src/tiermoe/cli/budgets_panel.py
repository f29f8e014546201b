"""The lower part of a comparison's picture: decode speed over memory, by what each preset's own run says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tiermoe.svg import CENTRED, FAINT, INK, Axis, circle, line, text

PANEL_HEIGHT = 380
_TOP, _BOTTOM = 60, 320  # of the panel
_GIB = 2**30
_COLOURS = ("#1f6fb4", "#2a9d54", "#8a4fbf", "#b48a1f", "#b41f5e", "#1fa7b4")


@dataclass(frozen=True, slots=True)
class Curve:
    """A preset: (GiB of memory, tokens a second) by rising memory, and those that were measured."""

    label: str
    points: Sequence[tuple[float, float]]
    measured: tuple[float, float]


def curve_of(result: dict[str, Any]) -> Curve | None:
    """Of one preset's result; None where its run says nothing of other budgets."""
    rows = result.get("other_budgets")
    if not rows:
        return None
    points = [(row["memory_bytes"] / _GIB, row["decode_tok_s"]) for row in rows]
    own = min(rows, key=lambda row: abs(row["cache_fraction"] - result["cache_fraction"]))
    return Curve(result["preset"], points, (own["memory_bytes"] / _GIB, result["decode_tok_s"]))


def budgets_panel(curves: Sequence[Curve], left: float, right: float, above: float) -> list[str]:
    """The curves between two edges, with everything above `above` left free."""
    top, bottom = above + _TOP, above + _BOTTOM
    every = [point for curve in curves for point in (*curve.points, curve.measured)]
    across = Axis(min(x for x, _ in every) * 0.98, max(x for x, _ in every) * 1.02, left, right)
    up = Axis(0.0, max(y for _, y in every) * 1.08, bottom, top)
    parts = [
        text(left, above + 16, "What other memory budgets would bring", 'font-size="16" font-weight="bold"'),
        *_frame(across, up, left, right, top, bottom),
    ]
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [(across.at(x), up.at(y)) for x, y in curve.points]
        parts += [line(*begin, *end, colour, 'stroke-width="2"') for begin, end in pairwise(places)]
        parts.append(circle(across.at(curve.measured[0]), up.at(curve.measured[1]), colour))
        parts.append(text(left + 12 + 130 * (number % 6), above + 38 + 14 * (number // 6), curve.label, _fill(colour)))
    return parts


def _frame(across: Axis, up: Axis, left: float, right: float, top: float, bottom: float) -> list[str]:
    middle = (top + bottom) / 2
    parts = []
    for value in up.ticks():
        y = up.at(value)
        parts += [line(left, y, right, y, FAINT), text(left - 8, y + 4, f"{value:g}", 'text-anchor="end"')]
    for value in across.ticks():
        x = across.at(value)
        parts += [line(x, bottom, x, bottom + 5, INK), text(x, bottom + 20, f"{value:g}", CENTRED)]
    return [
        *parts,
        line(left, bottom, right, bottom, INK),
        line(left, top, left, bottom, INK),
        text((left + right) / 2, bottom + 42, "memory, GiB; a dot is what was measured", CENTRED),
        text(20, middle, "decode, tokens per second", f'{CENTRED} transform="rotate(-90 20 {middle:.1f})"'),
    ]


def _fill(colour: str) -> str:
    return f'fill="{colour}" font-weight="bold"'
