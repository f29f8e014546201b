"""Markdown on a terminal, as it grows."""

from __future__ import annotations

import re
import time
from itertools import pairwise

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, SegmentLines

SECONDS_BETWEEN = 0.08
"""Seconds between two drawings of the last block, at least."""
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class MarkdownStream:
    """Markdown that grows on a terminal. Whole blocks are printed once and scroll away. The last block is drawn again
    as it grows: as much of its end as the terminal has lines for. Tags are text, control characters are escaped."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # as rich's Markdown has it, which would leave out tags and the addresses of pictures
        self._parser = MarkdownIt(options_update={"html": False}).enable(["strikethrough", "table"]).disable("image")
        self._live = Live(
            self, console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._text = ""  # of the last block, and of lines that are not whole
        self._first = True  # whether nothing was printed
        self._drawn = 0.0  # when the last block was

    def add(self, piece: str) -> None:
        """The next piece of the text."""
        self._text += _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), piece)
        if not self._live.is_started:
            self._live.start()
        if "\n" in piece:
            self._print_whole_blocks()
        if time.perf_counter() - self._drawn >= SECONDS_BETWEEN:
            self._live.refresh()
            self._drawn = time.perf_counter()

    def close(self) -> None:
        """Prints the rest."""
        self._live.stop()
        for block in self._blocks(self._text):
            self._print(block)

    def _print_whole_blocks(self) -> None:
        """All but the last block that has a whole line: with it the next lines may go on. What a line belongs to is
        known when it is whole."""
        end = self._text.rindex("\n") + 1
        *whole, _ = self._blocks(self._text[:end])
        self._text = self._text[len("".join(whole)) :]
        for block in whole:
            self._print(block)

    def _blocks(self, text: str) -> list[str]:
        """The blocks of a text, each with the empty lines after it."""
        lines = re.split("(?<=\n)", text)
        starts = [token.map[0] for token in self._parser.parse(text) if token.level == 0 and token.map]
        bounds = [0, *starts[1:], len(lines)]
        return ["".join(lines[start:end]) for start, end in pairwise(bounds)]

    def _print(self, text: str) -> None:
        if text.strip():
            self._console.print(SegmentLines(self._lines(text, self._console.options), new_lines=True))
            self._first = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The end of the last block. Only the end of its text is rendered: the time does not grow with the block."""
        most = max(1, console.height - 2)
        first, *rest = self._text.lstrip("\n").split("\n")
        text = "\n".join([first, *rest[-most:]])  # the first line says what the block is, like ```python
        yield SegmentLines(self._lines(text, options)[-most:], new_lines=True)

    def _lines(self, text: str, options: ConsoleOptions) -> list[list[Segment]]:
        """Lines of a block on the terminal, after an empty one where another block is above."""
        # addresses stand beside the text of links; the terminal's own colours
        shown = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
        shown.parsed = self._parser.parse(text)
        lines = self._console.render_lines(shown, options.update(height=None), pad=False)
        full = [number for number, line in enumerate(lines) if any(segment.text.strip() for segment in line)]
        lines = lines[full[0] : full[-1] + 1] if full else []
        return lines if self._first else [[], *lines]
