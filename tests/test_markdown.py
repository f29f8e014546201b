"""Markdown on a terminal: what stands there when an answer has come."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from tiermoe.cli import markdown
from tiermoe.cli.markdown import MarkdownStream

ANSWER = """\
# Title

Words that are **strong**, and <b>tags</b>; a line
goes on.
- one
- two

  more of two

1. first

2. second

| a | b |
|---|---|
| 1 | 2 |

```python
def f():

    return "# no title"
```
![picture](https://example.com/p.png) \x1b[31m

---
The end."""


class Screen:
    """A terminal of so many lines and columns: what was ever on it, as far as it obeys what rich writes."""

    def __init__(self, height: int, width: int) -> None:
        self.file, self._height, self._width = io.StringIO(), height, width
        self.console = Console(file=self.file, force_terminal=True, width=width, height=height, color_system=None)

    def lines(self) -> list[str]:
        lines, row, column = [""], 0, 0
        for code, text in re.findall(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", self.file.getvalue()):
            if text:
                assert column + len(text) <= self._width  # nothing wraps
                lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
                column += len(text)
            elif code == "\r":
                column = 0
            elif code == "\n":
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            elif code.endswith("A"):
                row -= int(code[2:-1] or 1)
                assert row >= len(lines) - self._height  # what has scrolled away is out of reach
            elif code == "\x1b[2K":
                lines[row] = ""
            else:
                assert code in ("\x1b[?25l", "\x1b[?25h"), code
        return [line.rstrip() for line in lines]


def shown(text: str, length: int, height: int, width: int = 60) -> list[str]:
    """The lines of a terminal on which a text came in pieces of `length` characters."""
    screen = Screen(height, width)
    stream = MarkdownStream(screen.console)
    for start in range(0, len(text), length):
        stream.add(text[start : start + length])
    stream.close()
    return screen.lines()


@pytest.fixture(autouse=True)
def _every_piece_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "SECONDS_BETWEEN", 0)


def test_a_whole_answer() -> None:
    lines = shown(ANSWER, len(ANSWER), 50)
    assert lines[0].strip() == "Title"
    for line in (
        "Words that are strong, and <b>tags</b>; a line goes on.", " • one", " 1 first", " a  b", " def f():",
        '     return "# no title"', "!picture (https://example.com/p.png) \\x1b[31m", "The end.",
    ):  # fmt: skip
        assert lines.count(line) == 1, line
    assert not any(a == b == "" for a, b in pairwise(lines))  # one empty line between blocks


@pytest.mark.parametrize("length", [1, 4, 11])
@pytest.mark.parametrize("height", [4, 12, 50])
def test_an_answer_that_comes_in_pieces(length: int, height: int) -> None:
    """Whatever scrolls away meanwhile, in the end all stands there once."""
    assert shown(ANSWER, length, height) == shown(ANSWER, len(ANSWER), height)


def test_a_block_longer_than_the_screen() -> None:
    code = "\n".join(f"line_{number} = {number}" for number in range(40))
    lines = shown(f"Before.\n\n```python\n{code}\n```\nAfter.", 5, 10)
    assert [line.strip() for line in lines if line] == ["Before.", *code.split("\n"), "After."]


def test_what_is_whole_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The characters that are rendered grow as the text does, not as its square."""
    rendered = 0
    parse = markdown.MarkdownIt.parse

    def counted(self: Any, text: str, *more: Any) -> Any:
        nonlocal rendered
        rendered += len(text)
        return parse(self, text, *more)

    monkeypatch.setattr(markdown.MarkdownIt, "parse", counted)
    counts = []
    for paragraphs in (10, 40):
        rendered = 0
        shown("A paragraph of some words.\n\n" * paragraphs, 3, 10)
        counts.append(rendered)
    assert counts[1] < 4.5 * counts[0]
