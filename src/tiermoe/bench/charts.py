"""The pictures of a measurement: speed over memory budget, and where the time of a token goes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tiermoe.bench.cases import OURS, Condition, named
from tiermoe.bench.summary import case_of, number
from tiermoe.svg import CENTRED, FAINT, INK, Axis, box, circle, line, picture, text

_WIDTH, _HEIGHT = 860, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 830, 40, 330  # the plot's edges
_STEP = 34  # pixels between series within a budget, at most
_LOG_FROM = 20  # times that the largest speed is the smallest, from which on the axis is logarithmic
_KEY_WIDTH, _KEY_LINE = 205, 18
_LETTER = 7.0
_COLOURS = ("#1f6fb4", "#d1570b", "#3a923a", "#8b5fbf", "#b03060", "#707070", "#0b8a8a", "#a07800")
_PARTS = (("compute_ms", "compute", "#1f6fb4"), ("wait_ms", "waiting", "#d1570b"),
          ("framework_ms", "framework", "#9a9a9a"))  # fmt: skip
_BAR, _GAP = 20, 12

Case = dict[str, Any]


def speed_over_budget(cases: Sequence[Case], key: str, title: str) -> str:
    """Tokens per second (`key`) of cases that differ in engine and budget alone: medians with their spread, our bounds
    as dashes, a cross where there are no figures. Empty where no case has any."""
    measured = [case for case in cases if case[key]]
    if not measured:
        return ""
    series = list(dict.fromkeys(_name(case) for case in cases))
    budgets = sorted({case_of(case).condition for case in cases}, key=_by_memory)
    up = axis_of([value for case in measured for value in _values(case, key)], _BOTTOM, _TOP)
    marks = ["bound (Belady's misses)"] if any(_bound(case, key) for case in measured) else []
    marks += ["no figures"] if len(measured) < len(cases) else []
    parts = [*_frame(up, title, budgets), *_key(series, marks)]
    for index, name in enumerate(series):
        mine = {case_of(case).condition: case for case in cases if _name(case) == name}
        parts += _series(mine, key, budgets, _offset(index, len(series), len(budgets)), up, colour_of(index))
    rows = -(-(len(series) + len(marks)) // _columns())
    return picture(_WIDTH, _HEIGHT + rows * _KEY_LINE, parts)


def time_per_token(cases: Sequence[Case]) -> str:
    """Bars of milliseconds of a token of ours: compute, waiting, the framework's own; a line where the bound lies.
    Empty where no case is split so."""
    shown = [case for case in cases if case["token_ms"] is not None]
    if not shown:
        return ""
    labels = [f"{_name(case)}, {case_of(case).condition.label}" for case in shown]
    left = min(_LETTER * max(map(len, labels)) + 20, _WIDTH / 2)
    across = Axis(0.0, max(_total(case) for case in shown) * 1.02, left, _WIDTH - 80)
    bottom = _TOP + len(shown) * (_BAR + _GAP) + 10
    parts = [text(left, 24, "Milliseconds of a token", 'font-size="14" font-weight="bold"')]
    for value in across.ticks():
        x = across.at(value)
        parts += [line(x, _TOP, x, bottom, FAINT), text(x, bottom + 18, f"{value:g}", CENTRED)]
    for row, (case, label) in enumerate(zip(shown, labels, strict=True)):
        parts += _bar(case, label, _TOP + 10 + row * (_BAR + _GAP), across)
    parts += _parts_key(left, bottom + 44)
    return picture(_WIDTH, bottom + 60, parts)


def _name(case: Case) -> str:
    return named(case["engine"], case["preset"])


def _by_memory(condition: Condition) -> float:
    return float("inf") if condition.memory is None else condition.memory


def _bound(case: Case, key: str) -> float | None:
    bound: float | None = case["bound_tok_s"] if case["engine"] == OURS and key == "decode_tok_s" else None
    return bound


def _values(case: Case, key: str) -> list[float]:
    bound = _bound(case, key)
    return [case[key]["low"], case[key]["high"], *([bound] if bound else [])]


def axis_of(values: Sequence[float], begin: float, end: float) -> Axis:
    """An axis for positive values between two pixels: from 0, or logarithmic where they are far apart."""
    least, most = min(values), max(values)
    if most > _LOG_FROM * least:
        return Axis(least / 1.5, most * 1.5, begin, end, logarithmic=True)
    return Axis(0.0, most * 1.12, begin, end)


def colour_of(index: int) -> str:
    """The colour of a series."""
    return _COLOURS[index % len(_COLOURS)]


def _middle(budget: int, budgets: int) -> float:
    return _LEFT + (_RIGHT - _LEFT) * (budget + 0.5) / budgets


def _offset(index: int, series: int, budgets: int) -> float:
    step = min(_STEP, (_RIGHT - _LEFT) / budgets / (series + 1))
    return (index - (series - 1) / 2) * step


def _frame(up: Axis, title: str, budgets: Sequence[Condition]) -> list[str]:
    middle = (_TOP + _BOTTOM) / 2
    parts = [text(_LEFT, 24, title, 'font-size="14" font-weight="bold"')]
    for value in up.ticks():
        y = up.at(value)
        parts += [line(_LEFT, y, _RIGHT, y, FAINT), text(_LEFT - 8, y + 4, f"{value:g}", 'text-anchor="end"')]
    for index, condition in enumerate(budgets):
        parts.append(text(_middle(index, len(budgets)), _BOTTOM + 20, condition.budget, CENTRED))
        if index:
            edge = (_middle(index - 1, len(budgets)) + _middle(index, len(budgets))) / 2
            parts.append(line(edge, _TOP, edge, _BOTTOM, FAINT, 'stroke-dasharray="2 4"'))
    return [
        *parts,
        line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, INK),
        line(_LEFT, _TOP, _LEFT, _BOTTOM, INK),
        text((_LEFT + _RIGHT) / 2, _BOTTOM + 42, "memory for the whole process", CENTRED),
        text(20, middle, "tokens per second", f'{CENTRED} transform="rotate(-90 20 {middle:.1f})"'),
    ]


def _series(
    mine: dict[Condition, Case], key: str, budgets: Sequence[Condition], offset: float, up: Axis, colour: str
) -> list[str]:
    parts, places = [], []
    for index, condition in enumerate(budgets):
        x = _middle(index, len(budgets)) + offset
        case = mine.get(condition)
        if case is None:
            continue
        if not case[key]:
            parts.append(_cross(x, _BOTTOM - 9, colour))
            continue
        speed, bound = case[key], _bound(case, key)
        y = up.at(speed["median"])
        places.append((x, y))
        top = up.at(speed["high"])
        parts += [
            line(x, up.at(speed["low"]), x, top, colour, 'stroke-width="2"'),
            circle(x, y, colour),
            text(x, min(y, top) - 9, number(speed["median"]), f'{CENTRED} font-size="11"'),
        ]
        if bound:
            level = up.at(bound)
            parts.append(line(x - 13, level, x + 13, level, colour, 'stroke-width="2" stroke-dasharray="4 3"'))
    links = [line(*a, *b, colour, 'opacity="0.35"') for a, b in pairwise(places)]
    return [*links, *parts]


def _cross(x: float, y: float, colour: str) -> str:
    style = 'stroke-width="2"'
    return line(x - 4, y - 4, x + 4, y + 4, colour, style) + line(x - 4, y + 4, x + 4, y - 4, colour, style)


def _columns() -> int:
    return int((_RIGHT - _LEFT) // _KEY_WIDTH)


def _key(series: Sequence[str], marks: Sequence[str]) -> list[str]:
    """What the colours, dashes and crosses stand for, below the plot."""
    parts = []
    for index, name in enumerate([*series, *marks]):
        x = _LEFT + index % _columns() * _KEY_WIDTH
        y = _BOTTOM + 72 + index // _columns() * _KEY_LINE
        if index < len(series):
            mark = circle(x + 6, y - 4, colour_of(index))
        elif name == "no figures":
            mark = _cross(x + 6, y - 4, INK)
        else:
            mark = line(x - 4, y - 4, x + 14, y - 4, INK, 'stroke-width="2" stroke-dasharray="4 3"')
        parts += [mark, text(x + 20, y, name)]
    return parts


def _total(case: Case) -> float:
    return float(sum(case[name] for name, _, _ in _PARTS))


def _bar(case: Case, label: str, y: float, across: Axis) -> list[str]:
    parts = [text(across.begin - 10, y + 14, label, 'text-anchor="end"')]
    x = across.begin
    for name, _, colour in _PARTS:
        width = across.at(case[name]) - across.begin
        parts.append(box(x, y, width, _BAR, colour))
        x += width
    parts.append(text(x + 6, y + 14, number(_total(case))))
    if case["bound_tok_s"]:
        bound = across.at(1e3 / case["bound_tok_s"])
        parts.append(line(bound, y - 4, bound, y + _BAR + 4, INK, 'stroke-width="2"'))
    return parts


def _parts_key(x: float, y: float) -> list[str]:
    parts = []
    for _, name, colour in _PARTS:
        parts += [box(x, y - 10, 12, 12, colour), text(x + 18, y, name)]
        x += 100
    return [*parts, line(x + 4, y - 12, x + 4, y + 4, INK, 'stroke-width="2"'), text(x + 14, y, "the bound")]
