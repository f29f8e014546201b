"""Console on standard output that tables are printed on."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from tiermoe.cli.output import plain

WIDE = 120
"""Columns of a table that goes to a file or a pipe."""


class Terminal(Console):
    """rich's console for text that may come from a model: markup is not interpreted, and control characters are
    escaped. piped: columns where standard output is no terminal."""

    def __init__(self, piped: int | None = None) -> None:
        super().__init__(markup=False, emoji=False)
        if piped is not None and not self.is_terminal:
            self.width = piped

    def render_str(self, text: str, **options: Any) -> Text:
        """The text of a cell or a title, with its control characters escaped."""
        return super().render_str("\n".join(map(plain, text.split("\n"))), **options)
