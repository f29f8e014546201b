"""Axes and marks of pictures, as SVG text."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

INK, FAINT = "#222", "#ddd"
CENTRED = 'text-anchor="middle"'


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from `low` to `high` along pixels from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        return self.begin + (self._scaled(value) - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Round values along the axis: 1, 2 or 5 times a power of ten; of many powers, these alone."""
        if self.logarithmic:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            digits = (1, 2, 5) if len(powers) < 5 else (1,)
            values = [digit * 10.0**power for power in powers for digit in digits]
            return [value for value in values if self.low <= value <= self.high]
        rough = (self.high - self.low) / 6
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough)
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value


def text(x: float, y: float, words: str, style: str = "") -> str:
    """Words that begin at (x, y), or as the style's text-anchor says."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, style: str = "") -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {style}/>'


def circle(x: float, y: float, colour: str) -> str:
    """A dot of 10 pixels."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>'


def diamond(x: float, y: float, colour: str) -> str:
    """A diamond of 12 pixels."""
    return f'<path d="M{x:.1f} {y - 6:.1f} l6 6 l-6 6 l-6 -6 z" fill="{colour}"/>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A filled rectangle from its upper left corner."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def picture(width: float, height: float, parts: list[str]) -> str:
    """A whole picture on white."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" font-size="12" fill="{INK}">',
            f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )
