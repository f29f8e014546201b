"""The terminal that tables are printed on."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from tiermoe.cli.output import plain


class Terminal(Console):
    """rich's console for texts in which a model may have a say: no markup in them is followed, and no control character
    comes through. piped: columns where standard output is no terminal."""

    def __init__(self, piped: int | None = None) -> None:
        super().__init__(markup=False, emoji=False)
        if piped is not None and not self.is_terminal:
            self.width = piped

    def render_str(self, text: str, **options: Any) -> Text:
        """A cell or a title, of one line or several."""
        return super().render_str("\n".join(map(plain, text.split("\n"))), **options)
