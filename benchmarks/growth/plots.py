"""Line plots: medians with their range, bounds as dashes, bends as numbered verticals."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tiermoe.bench.charts import axis_of, colour_of
from tiermoe.svg import CENTRED, FAINT, INK, Axis, circle, line, picture, text

_WIDTH, _BOTTOM, _LEFT, _RIGHT, _TOP = 860, 330, 80, 830, 56
_KEY_LINE = 18
_LETTER, _LABEL_GAP, _LABEL_WIDTH = 7.0, 8.0, 36.0
_DASHED = 'stroke-width="2" stroke-dasharray="5 4"'


@dataclass(frozen=True)
class Curve:
    """`points`: (x, lowest, median, highest) by rising x; `bound`: (x, y)."""

    name: str
    points: Sequence[tuple[float, float, float, float]]
    bound: Sequence[tuple[float, float]] = field(default_factory=tuple)


def plot(
    title: str, along: str, up: str, curves: Sequence[Curve], bound: str, marks: Sequence[tuple[int, float]]
) -> str:
    """One picture over a logarithmic x. along, up: what the axes are; bound: what dashes are; marks: (number, x).
    Empty where no curve has points."""
    xs = sorted({point[0] for curve in curves for point in curve.points})
    if not xs:
        return ""
    values = [value for curve in curves for point in curve.points for value in point[1:]]
    values += [y for curve in curves for _, y in curve.bound]
    across = Axis(xs[0] / 1.15, xs[-1] * 1.15, _LEFT, _RIGHT, logarithmic=True)
    rising = axis_of(values, _BOTTOM, _TOP) if min(values) > 0 else Axis(0.0, max(values) * 1.12 or 1.0, _BOTTOM, _TOP)
    parts = [text(_LEFT, 22, title, 'font-size="14" font-weight="bold"'), *_frame(across, rising, xs, along, up)]
    parts += _marks([(number, across.at(at)) for number, at in marks])
    for index, curve in enumerate(curves):
        parts += _drawn(curve, across, rising, colour_of(index))
    names = [curve.name for curve in curves]
    dashes = [bound] if any(curve.bound for curve in curves) else []
    return picture(_WIDTH, _BOTTOM + 64 + _KEY_LINE * len([*names, *dashes]), [*parts, *_key(names, dashes)])


def _frame(across: Axis, rising: Axis, xs: Sequence[float], along: str, up: str) -> list[str]:
    parts = []
    for value in rising.ticks():
        y = rising.at(value)
        parts += [line(_LEFT, y, _RIGHT, y, FAINT), text(_LEFT - 8, y + 4, f"{value:g}", 'text-anchor="end"')]
    written = -1e9  # where the last label ended
    for value in xs:
        x, half = across.at(value), _LETTER * len(f"{value:g}") / 2
        parts.append(line(x, _BOTTOM, x, _BOTTOM + 4, INK))
        if x - half >= written + _LABEL_GAP:
            parts.append(text(x, _BOTTOM + 18, f"{value:g}", CENTRED))
            written = x + half
    middle = (_TOP + _BOTTOM) / 2
    return [
        *parts,
        line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, INK),
        line(_LEFT, _TOP, _LEFT, _BOTTOM, INK),
        text((_LEFT + _RIGHT) / 2, _BOTTOM + 38, along, CENTRED),
        text(20, middle, up, f'{CENTRED} transform="rotate(-90 20 {middle:.1f})"'),
    ]


def _marks(places: Sequence[tuple[int, float]]) -> list[str]:
    """Verticals at pixels x, numbered above; those that stand close share a label."""
    parts, groups = [], list[tuple[float, list[int]]]()
    for number, x in sorted(places, key=lambda place: place[1]):
        parts.append(line(x, _TOP, x, _BOTTOM, INK, 'stroke-dasharray="1 4"'))
        if groups and x - groups[-1][0] < _LABEL_WIDTH:
            groups[-1][1].append(number)
        else:
            groups.append((x, [number]))
    words = [(x, f"({', '.join(map(str, sorted(numbers)))})") for x, numbers in groups]
    return [*parts, *(text(x, _TOP - 6, label, CENTRED) for x, label in words)]


def _drawn(curve: Curve, across: Axis, rising: Axis, colour: str) -> list[str]:
    places = [(across.at(x), rising.at(y)) for x, _, y, _ in curve.points]
    bounds = [(across.at(x), rising.at(y)) for x, y in curve.bound]
    parts = [line(*a, *b, colour, 'stroke-width="2"') for a, b in pairwise(places)]
    parts += [line(*a, *b, colour, _DASHED) for a, b in pairwise(bounds)]
    for (x, y), (_, low, _, high) in zip(places, curve.points, strict=True):
        parts += [
            line(x, rising.at(low), x, rising.at(high), colour, 'stroke-width="2"'),
            circle(x, y, colour),
        ]
    return parts


def _key(names: Sequence[str], dashes: Sequence[str]) -> list[str]:
    parts = []
    for index, name in enumerate([*names, *dashes]):
        y = _BOTTOM + 62 + index * _KEY_LINE
        dashed = index >= len(names)
        mark = line(_LEFT - 4, y - 4, _LEFT + 16, y - 4, INK, _DASHED) if dashed else ""
        parts += [mark or circle(_LEFT + 6, y - 4, colour_of(index)), text(_LEFT + 24, y, name)]
    return parts
