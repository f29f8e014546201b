"""A measurement as tables on a terminal."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tiermoe.bench.columns import Column, figures, speeds, spent, split_up
from tiermoe.bench.summary import case_of

_WIDE = 200  # columns of a table that goes to a file or a pipe


def print_tables(document: dict[str, Any]) -> None:
    """The speeds of every case that has figures, a rule between conditions; then where our own time went."""
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDE)
    for cases, columns in ((figures(document), speeds(document)), (split_up(document), spent())):
        if cases:
            console.print(_drawn(cases, [column for column in columns if any(map(column[1], cases))]))


def _drawn(cases: list[dict[str, Any]], columns: list[Column]) -> Table:
    found = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, (title, _) in enumerate(columns):
        found.add_column(title, justify="right" if index else "left", no_wrap=not index)
    for case, later in zip(cases, [*cases[1:], None], strict=True):
        ends = later is not None and case_of(later).condition != case_of(case).condition
        found.add_row(*(show(case) for _, show in columns), end_section=ends)
    return found
