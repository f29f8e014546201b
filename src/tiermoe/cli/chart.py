"""One picture of a comparison: a row for each preset, with decode speed and what it costs in quality side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tiermoe.svg import CENTRED, FAINT, INK, Axis, circle, diamond, line, picture, text

_WIDTH, _TOP, _ROW = 920, 110, 26
_NAMES, _CACHED = 20, 180  # where presets' names begin, and where the shares of the experts that they cache end
_SPEED, _QUALITY = (200, 480), (570, 840)  # left and right edges of the panels; a column of figures follows each
_FIGURE = 'text-anchor="end" fill="#555"'
_COLUMN = 60  # its width
_EXACT, _LOSSY = "#1f6fb4", "#d1570b"
_LOGARITHMIC_FROM = 3  # times that the largest value is the smallest

_QUALITIES = (("kl", "KL divergence to 16 bits, nats per token"), ("perplexity", "perplexity"))
_LINES = "lines: speed's range over the rounds, the standard error of quality"

Spread = tuple[float, float, float]
"""Low end, value, high end."""


def draw(results: Sequence[dict[str, Any]]) -> str:
    """The picture of `tiermoe compare`'s results, as SVG text: a row for each preset that was measured, in their order;
    in it decode tokens per second with the range over rounds, and KL divergence (perplexity where there was no
    reference) with its standard error."""
    measured = [result for result in results if "error" not in result]
    key, title = next((key, title) for key, title in _QUALITIES if all(key in result for result in measured))
    speeds = [
        (low, result["decode_tok_s"], high) for result in measured for low, high in [result["decode_tok_s_range"]]
    ]
    qualities = [_within_error(result[key], result.get(f"{key}_se")) for result in measured]
    first, lossy = measured[0], [bool(result["lossy"]) for result in measured]
    parts = [
        text(_NAMES, 28, "Decode speed and what it costs", 'font-size="16" font-weight="bold"'),
        text(_NAMES, 48, f"{first['tokens']} tokens; rounds: {first['rounds']}; {_LINES}", 'font-size="11"'),
        circle(_NAMES + 6, 70, _EXACT), text(_NAMES + 18, 74, "exact"),
        diamond(_NAMES + 86, 70, _LOSSY), text(_NAMES + 98, 74, "lossy: may change what the model says"),
        text(_CACHED, _TOP - 10, "cached", 'text-anchor="end"'),
        *(part for row, result in enumerate(measured) for part in _names(_middle(row) + 4, result)),
        *_panel(_SPEED, "decode, tokens per second (more is better)", speeds, lossy, in_figures),
        *_panel(_QUALITY, f"{title} (less is better)", qualities, lossy, lambda cost: f"{cost:#.3g}"),
    ]  # fmt: skip
    return picture(_WIDTH, _middle(len(measured)) + 36, parts)


def _names(y: float, result: dict[str, Any]) -> tuple[str, str]:
    return text(_NAMES, y, result["preset"]), text(_CACHED, y, f"{result['cache_fraction']:.0%}", _FIGURE)


def in_figures(speed: float) -> str:
    """Tokens per second as people read them."""
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"


def _within_error(value: float, error: float | None) -> Spread:
    return value - (error or 0.0), value, value + (error or 0.0)


def _middle(row: int) -> float:
    return _TOP + _ROW * (row + 0.5)


def _panel(
    edges: tuple[int, int], title: str, values: Sequence[Spread], lossy: Sequence[bool], form: Callable[[float], str]
) -> list[str]:
    """Rows of a mark at each value with a line from its low to its high end, and the value in figures."""
    (left, right), bottom = edges, _TOP + _ROW * len(values)
    axis = _axis(values, left, right)
    parts = [text((left + right) / 2, _TOP - 10, title, CENTRED), line(left, bottom, right, bottom, INK)]
    for tick in axis.ticks():
        x = axis.at(tick)
        parts += [line(x, _TOP, x, bottom, FAINT), text(x, bottom + 18, f"{tick:g}", CENTRED)]
    for row, (spread, changes) in enumerate(zip(values, lossy, strict=True)):
        y, colour, mark = _middle(row), *((_LOSSY, diamond) if changes else (_EXACT, circle))
        low, x, high = (axis.at(max(each, axis.low)) for each in spread)
        parts += [line(left, y, right, y, FAINT), line(low, y, high, y, colour, 'stroke-width="2"'), mark(x, y, colour)]
        parts.append(text(right + _COLUMN, y + 4, form(spread[1]), _FIGURE))
    return parts


def _axis(values: Sequence[Spread], left: float, right: float) -> Axis:
    """From a little below the lowest to a little above the highest. Values of 0 stand at a logarithmic axis's end."""
    middles = [value for _, value, _ in values if value > 0]
    highest = max(high for _, _, high in values)
    if middles and max(middles) > _LOGARITHMIC_FROM * min(middles):
        return Axis(min(middles) / 1.5, highest * 1.2, left, right, logarithmic=True)
    lowest = min(low for low, _, _ in values)
    margin = 0.05 * (highest - lowest) or abs(highest) or 1.0
    return Axis(lowest - margin, highest + margin, left, right)
