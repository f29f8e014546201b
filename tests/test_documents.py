"""Documents for users: their commands exist and run, the messages that they quote are the program's."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import Command
from options_document import FILE as OPTIONS
from tiermoe.cli.main import COMMANDS
from tiermoe.config import parse_size

ROOT = Path(__file__).parents[1]
DOCS, SOURCE = ROOT / "docs", ROOT / "src" / "tiermoe"
QUICKSTART = (DOCS / "quickstart.md").read_text()
_VALUE = "…"  # of names and numbers


def messages() -> list[str]:
    """Every text in the source but docstrings, with `_VALUE` for what is put into it."""
    trees = [ast.parse(file.read_text()) for file in SOURCE.rglob("*.py")]
    return [
        text for tree in trees for node in ast.walk(tree) if not isinstance(node, ast.Expr) for text in _texts(node)
    ]


def _texts(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else _VALUE for part in child.values)
            yield "".join(map(str, parts))
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield re.sub(r"\{[^}]*\}", _VALUE, child.value)  # of a text that is formatted later


def quoted() -> list[str]:
    """The messages in the first columns of docs/troubleshooting.md."""
    rows = [line.split("|")[1] for line in (DOCS / "troubleshooting.md").read_text().splitlines() if line[:2] == "| "]
    return [text for cell in rows for text in re.findall(r"`([^`]+)`", cell) if not text.startswith('"')]


def test_the_program_has_every_message_that_is_quoted() -> None:
    """… of a quotation stands for a value of the source, or for several with words between them."""
    found, value = messages(), f"{_VALUE}(?:[^{_VALUE}]*{_VALUE})*"
    patterns = {text: re.compile(value.join(map(re.escape, text.split(_VALUE)))) for text in quoted()}
    assert len(patterns) > 50
    assert [text for text, pattern in patterns.items() if not any(map(pattern.search, found))] == []


def commands_of(text: str) -> list[list[str]]:
    """The words of each indented line that begins with `tiermoe`."""
    return [shlex.split(line) for line in text.splitlines() if re.match(r"    tiermoe ", line)]


@pytest.mark.parametrize("words", commands_of(QUICKSTART), ids=" ".join)
def test_a_command_of_the_quickstart_is_one(words: list[str]) -> None:
    _, command, *rest = words
    assert command in COMMANDS
    section = OPTIONS.read_text().partition(f"\n## {command}\n")[2].partition("\n## ")[0]
    engine = OPTIONS.read_text().partition("\n## ")[2] if "Options of the engine" in section else ""
    flags = {word for word in rest if word.startswith("--")}
    assert {flag for flag in flags if f"`{flag}`" not in section + engine} == set()


def test_links_of_the_notebook_lead_somewhere() -> None:
    """The site does not have the notebook. Its index names every note, and a note's name begins with a date."""
    notes = sorted((ROOT / "notebook").glob("*.md"))
    links = {note: re.findall(r"\]\(([^)#:]+)[^)]*\)", note.read_text()) for note in notes}
    assert [(note.name, link) for note in notes for link in links[note] if not (note.parent / link).exists()] == []
    *dated, index = notes
    assert {note.name for note in dated} <= {*links[index]}
    assert [note.name for note in dated if not re.match(r"20\d\d-\d\d-\d\d-", note.name)] == []


SHIPPED = [words for words in commands_of(QUICKSTART) if "stories-7m" in words and words[1] == "run"]


def test_the_shipped_model_answers_as_the_quickstart_says(tiermoe_: Command) -> None:
    """The same text with a quarter of the experts in memory as with all."""
    first, small = SHIPPED
    said = tiermoe_(*first[1:])
    assert said.code == 0, said.err
    assert said.out.strip()
    assert "60 tokens" in said.err
    whole, quarter = tiermoe_(*small[1:-2]), tiermoe_(*small[1:])
    assert small[-2:] == ["--cache", "25%"]
    assert whole.out == quarter.out
    # an expert is read by the pass that needs it before the background has brought it
    assert bytes_read(whole.err) < bytes_read(quarter.err)


def bytes_read(summary: str) -> int:
    """Of the line behind an answer."""
    found = re.search(r", (\S+ \S+) read", summary)
    assert found is not None
    return 0 if found[1] == "0 B" else parse_size(found[1])
