"""Documents for users: their commands exist and run, the messages that they quote are the program's."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from commands import Command
from tiermoe.cli.main import COMMANDS, app
from tiermoe.config import parse_size

ROOT = Path(__file__).parents[1]
DOCS, SOURCE = ROOT / "docs", ROOT / "src" / "tiermoe"
QUICKSTART = (DOCS / "quickstart.md").read_text()
_VALUE = "…"  # of names and numbers


@cache
def nodes() -> list[ast.AST]:
    """All of the source."""
    return [node for file in SOURCE.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]


def messages() -> set[str]:
    """Every text in the source but docstrings, with `_VALUE` for what is put into it."""
    return {text for node in nodes() if not isinstance(node, ast.Expr) for text in _texts(node)}


def _texts(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else _VALUE for part in child.values)
            yield "".join(map(str, parts))
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield re.sub(r"\{[^}]*\}|%s", _VALUE, child.value)  # of a text that is formatted later


def quoted() -> list[str]:
    """The messages in the first columns of docs/troubleshooting.md."""
    rows = [line.split("|")[1] for line in (DOCS / "troubleshooting.md").read_text().splitlines() if line[:2] == "| "]
    return [text for cell in rows for text in re.findall(r"`([^`]+)`", cell) if not text.startswith('"')]


def test_the_program_has_every_message_that_is_quoted() -> None:
    """… of a quotation stands for a value of the source, or for several with words between them."""
    found, value = messages(), f"{_VALUE}(?:[^{_VALUE}]*{_VALUE})*"
    patterns = {text: re.compile(value.join(map(re.escape, text.split(_VALUE)))) for text in quoted()}
    assert len(patterns) > 50
    longest = {text: max(text.split(_VALUE), key=len) for text in patterns}
    assert [
        text
        for text, pattern in patterns.items()
        if not any(longest[text] in each and pattern.search(each) for each in found)
    ] == []


def commands_of(text: str) -> list[list[str]]:
    """The words of each indented line that begins with `tiermoe`."""
    return [shlex.split(line) for line in text.splitlines() if re.match(r"    tiermoe ", line)]


@pytest.mark.parametrize("words", commands_of(QUICKSTART), ids=" ".join)
def test_a_command_of_the_quickstart_is_one(words: list[str]) -> None:
    _, command, *rest = words
    assert command in COMMANDS
    group: Any = typer.main.get_command(app)
    options = group.resolve_command(None, [command])[1].params
    flags = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
    assert {word for word in rest if word.startswith("--")} <= flags


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


def test_the_names_that_are_imported_of_transformers_are_listed() -> None:
    page = (DOCS / "architecture.md").read_text()
    section = page.partition("## What is relied on in transformers")[2].partition("\n## ")[0]
    imported = [
        alias.name
        for node in nodes()
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers"
        for alias in node.names
    ]
    assert len(imported) > 20
    assert [name for name in imported if f"`{name}" not in section] == []
