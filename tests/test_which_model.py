"""docs/which-model.md: made of plans, and current."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.which_model import COLUMNS, FILE, INTERPRETER, MODELS, Model, document, row, write_headers
from commands import Command
from tiermoe import native

pytestmark = pytest.mark.skipif(not native.available(), reason="the document is of compiled kernels")
QUICK = [model for model in MODELS if model.kind in ("gpt-oss-20b", "mixtral-8x7b")]
"""Of few tensors: one with experts in their own types, one whose experts are packed."""


_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def check(written: str, now: str) -> None:
    """The same words, and numbers that differ no more than other kernels' memory makes them."""
    assert _NUMBER.sub("#", written) == _NUMBER.sub("#", now), "run: python -m benchmarks.which_model"
    numbers = [[float(each) for each in _NUMBER.findall(text)] for text in (written, now)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.1), "run: python -m benchmarks.which_model"


@pytest.mark.long
def test_the_document_is_current() -> None:
    check(FILE.read_text(), document())


@pytest.mark.parametrize("model", QUICK, ids=lambda model: model.kind)
def test_a_row_is_current(model: Model, tmp_path: Path) -> None:
    with mock.patch("tiermoe.engine.budget.resident_bytes", return_value=INTERPRETER):
        now = row(write_headers(model, tmp_path / "model"), model)
    (written,) = (line for line in FILE.read_text().splitlines() if model.name in line)
    check(written, now)


def test_a_cell_is_what_the_command_prints(tiermoe_: Command, tmp_path: Path) -> None:
    """But for the interpreter, which is larger here than the document's: fewer experts have a slot."""
    (model, *_), column = QUICK, COLUMNS[0]
    checkpoint = write_headers(model, tmp_path / "model")
    cell = next(line for line in FILE.read_text().splitlines() if model.name in line).split("|")[3]
    low, high = (float(word) for word in cell.split() if word.replace(".", "").isdigit())
    printed = json.loads(tiermoe_("plan", checkpoint, *column.flags.split(), "--device", "cpu", "--json").out)
    speed = printed["expectation"]["decode_tok_s"]
    assert [speed["low"], speed["high"]] == pytest.approx([low, high], rel=0.25)
