"""One picture of a comparison: decode speed over what it costs in quality, a self-contained SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiermoe.cli.budgets_panel import PANEL_HEIGHT, budgets_panel, curve_of
from tiermoe.svg import CENTRED, FAINT, INK, Axis, circle, diamond, line, picture, text

_WIDTH, _HEIGHT = 900, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 30, 70, 500  # the plot's edges; _RIGHT from the picture's
_EDGE = _WIDTH - _RIGHT
_LINE = 15  # a label's height
_LETTER = 7.0  # a letter's width, 12 px sans-serif
_LOG_FROM = 30  # times that the largest x is the smallest, from which on the axis is logarithmic
_EXACT, _LOSSY = "#1f6fb4", "#d1570b"

_AXES = (("kl", "KL divergence to the 16-bit weights, nats per token"), ("perplexity", "perplexity"))


@dataclass(frozen=True, slots=True)
class Point:
    """A preset: cost `x`, speed `y` with the least and most of its rounds."""

    label: str
    x: float
    y: float
    low: float
    high: float
    exact: bool


def draw(results: Sequence[dict[str, Any]]) -> str:
    """The picture of `tiermoe compare`'s results, as SVG text: decode tokens per second over KL divergence (perplexity
    where there was no reference), a labelled point for each preset that was measured; below, for those whose runs say
    so, over memory what other budgets would bring."""
    measured = [result for result in results if "error" not in result]
    key, title = next((key, title) for key, title in _AXES if all(key in result for result in measured))
    points = [_point(result, key) for result in measured]
    across, up = _axes(points, from_zero=key == "kl")
    leaders, labels = _labels(points, across, up)
    curves = [curve for result in measured if (curve := curve_of(result)) is not None]
    parts = [
        *_frame(across, up, title),
        text(_EDGE, 50, _conditions(measured), 'text-anchor="end" font-size="11"'),
        *leaders,
        *(_mark(point, across, up) for point in points),
        *labels,
        *(budgets_panel(curves, _LEFT, _EDGE, _HEIGHT) if curves else []),
    ]
    return picture(_WIDTH, _HEIGHT + (PANEL_HEIGHT if curves else 0), parts)


def _conditions(results: Sequence[dict[str, Any]]) -> str:
    cached = max(result["cache_fraction"] for result in results)
    return f"at most {cached:.0%} of the experts cached; {results[0]['tokens']} tokens; rounds: {results[0]['rounds']}"


def _point(result: dict[str, Any], key: str) -> Point:
    low, high = result["decode_tok_s_range"]
    return Point(result["preset"], result[key], result["decode_tok_s"], low, high, exact=not result["lossy"])


def _axes(points: Sequence[Point], from_zero: bool) -> tuple[Axis, Axis]:
    values = [point.x for point in points]
    least, most = min(values), max(values)
    logarithmic = least > 0 and most > _LOG_FROM * least
    if logarithmic:
        across = Axis(least / 1.5, most * 1.5, _LEFT, _EDGE, logarithmic=True)
    else:
        spread = (most - least) or abs(most) or 1.0
        across = Axis(0.0 if from_zero and least >= 0 else least - 0.1 * spread, most + 0.1 * spread, _LEFT, _EDGE)
    return across, Axis(0.0, max(point.high for point in points) * 1.08 or 1.0, _BOTTOM, _TOP)


def _frame(across: Axis, up: Axis, title: str) -> list[str]:
    middle = (_TOP + _BOTTOM) / 2
    parts = [text(_LEFT, 26, "Decode speed and what it costs", 'font-size="16" font-weight="bold"')]
    for value in up.ticks():
        y = up.at(value)
        parts += [line(_LEFT, y, _EDGE, y, FAINT), text(_LEFT - 8, y + 4, f"{value:g}", 'text-anchor="end"')]
    for value in across.ticks():
        x = across.at(value)
        parts += [line(x, _BOTTOM, x, _BOTTOM + 5, INK), text(x, _BOTTOM + 20, f"{value:g}", CENTRED)]
    parts += [
        line(_LEFT, _BOTTOM, _EDGE, _BOTTOM, INK),
        line(_LEFT, _TOP, _LEFT, _BOTTOM, INK),
        text((_LEFT + _EDGE) / 2, _BOTTOM + 46, title, CENTRED),
        text(20, middle, "decode, tokens per second", f'{CENTRED} transform="rotate(-90 20 {middle:.1f})"'),
        circle(_LEFT + 6, 46, _EXACT), text(_LEFT + 18, 50, "exact"),
        diamond(_LEFT + 86, 46, _LOSSY), text(_LEFT + 98, 50, "lossy: may change what the model says"),
    ]  # fmt: skip
    return parts


def _mark(point: Point, across: Axis, up: Axis) -> str:
    x, y = across.at(point.x), up.at(point.y)
    spread = line(x, up.at(point.low), x, up.at(point.high), _EXACT if point.exact else _LOSSY)
    return spread + (circle(x, y, _EXACT) if point.exact else diamond(x, y, _LOSSY))


def _labels(points: Sequence[Point], across: Axis, up: Axis) -> tuple[list[str], list[str]]:
    """A label for each point beside it, further up or down with a line to it where others are in the way: the lines,
    and the labels."""
    places = [(across.at(point.x), up.at(point.y)) for point in points]
    taken = [_Box(x - 6, y - 6, x + 6, y + 6) for x, y in places]
    leaders, labels = [], []
    for point, (x, y) in sorted(zip(points, places, strict=True), key=lambda pair: pair[1][1]):
        box, away = _free_place(x, y, _LETTER * len(point.label), taken)
        taken.append(box)
        if away:
            end = box.left if box.left > x else box.right
            leaders.append(line(x, y, end, box.middle, "#999"))
        labels.append(text(box.left, box.bottom - 4, point.label))
    return leaders, labels


@dataclass(frozen=True, slots=True)
class _Box:
    left: float
    top: float
    right: float
    bottom: float

    @property
    def middle(self) -> float:
        return (self.top + self.bottom) / 2

    def meets(self, other: _Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def _free_place(x: float, y: float, width: float, taken: Sequence[_Box]) -> tuple[_Box, bool]:
    """Where a label of this width goes, and whether it stands away from its point at (x, y)."""
    beside = _label_box(x, y, width, 10, 0)
    for lines in range(2 * (_BOTTOM - _TOP) // _LINE):
        for gap in (10, -10) if lines == 0 else (24, -24):
            for shift in (0,) if lines == 0 else (-lines * _LINE / 2, lines * _LINE / 2):
                box = _label_box(x, y, width, gap, shift)
                inside = box.left > _LEFT and box.right < _WIDTH and box.top > _TOP - _LINE and box.bottom <= _BOTTOM
                if inside and not any(box.meets(other) for other in taken):
                    return box, lines > 0
    return beside, False


def _label_box(x: float, y: float, width: float, gap: float, shift: float) -> _Box:
    left = x + gap if gap > 0 else x + gap - width
    return _Box(left, y + shift - _LINE / 2, left + width, y + shift + _LINE / 2)
