"""Five published systems, a file each: its preset, the ladder of its parts, the arithmetic of its calibration, and what
its paper evaluates beside what is had here."""

from __future__ import annotations

from tiermoe.lab.papers import corm, edgemoe, fate, hobbit, mobile
from tiermoe.lab.papers.figure import DEFAULT_LADDER, Figure, Ladder, Paper, Row

_ALL = (hobbit, edgemoe, mobile, fate, corm)

PAPERS = {paper.PAPER.name: paper.PAPER for paper in _ALL}

LADDERS: dict[str, Ladder] = {"default": DEFAULT_LADDER, **{paper.PRESET.name: paper.LADDER for paper in _ALL}}
"""Preset → its parts in the order in which they are switched on."""

__all__ = ["LADDERS", "PAPERS", "Figure", "Ladder", "Paper", "Row"]
