"""What the papers of the five systems evaluate, beside what is had here: figures by paper, from replays of a trace, its
statistics, and evaluations of a model."""

from __future__ import annotations

from tiermoe.lab.papers import corm, edgemoe, fate, hobbit, mobile
from tiermoe.lab.papers.figure import Figure, Paper, Row
from tiermoe.lab.papers.runs import Runs

PAPERS = {paper.PAPER.name: paper.PAPER for paper in (hobbit, edgemoe, mobile, fate, corm)}

__all__ = ["PAPERS", "Figure", "Paper", "Row", "Runs"]
