"""The list of deliberate breakages fits the code: `python tools/breakages` then says whether each is found."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def table() -> Any:
    spec = importlib.util.spec_from_file_location("table", ROOT / "tools/breakages/table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["table"] = module
    spec.loader.exec_module(module)
    return module


BREAKAGES = table().BREAKAGES


def test_there_are_twenty_of_different_names() -> None:
    assert len({breakage.name for breakage in BREAKAGES}) == len(BREAKAGES) >= 20


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.name.replace(" ", "-"))
def test_it_changes_one_place_of_a_file_that_still_compiles(breakage: Any, tmp_path: Path) -> None:
    copy = tmp_path / breakage.file
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / breakage.file, copy)
    before = breakage.apply(tmp_path)
    assert before == (ROOT / breakage.file).read_text() != copy.read_text()
    compile(copy.read_text(), breakage.file, "exec")
    for test in breakage.tests:
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text()


def test_what_has_moved_on_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\na = 1\n")
    for old in ("a = 1", "b = 1"):
        with pytest.raises(ValueError, match="not once"):
            table().Breakage("name", "code.py", old, "a = 2", ()).apply(tmp_path)
