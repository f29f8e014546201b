"""The list of deliberate breakages fits the code: `python tools/breakages` then says whether each is found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools/breakages"))

from breakage import Breakage  # noqa: E402
from table import BREAKAGES  # noqa: E402


def test_each_has_a_name_of_its_own() -> None:
    assert len({breakage.name for breakage in BREAKAGES}) == len(BREAKAGES) > 140


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.name.replace(" ", "-"))
def test_it_changes_a_file_that_still_compiles_and_tests_that_find_it_exist(breakage: Any) -> None:
    path, text = breakage.broken(ROOT)
    assert text != path.read_text()
    if path.suffix == ".py":
        compile(text, path.name, "exec")
    assert breakage.node_ids(ROOT)


CODE = """
LIMIT = 3

def plain(x):
    return x + 1  # a comment

class Slots:
    if LIMIT:
        def place(self, key):
            if key in self.slots: return self.slots[key]
            for each in (1,
                         2):
                self.look(each, key)
            try:
                self.add(key)
            except KeyError:
                self.add(0)
            return x + 1
"""
C = """
/* f(x) */
static int
f(const int x) {
    if (x) { return x + 1; }
    return x;
}
int g(void) { return x + 1; }
"""


def tree(root: Path) -> Path:
    for file, text in {
        "src/tiermoe/a/slots.py": CODE,
        "src/tiermoe/b.py": "def twice(x):\n    return x\n",
        "src/tiermoe/c.py": "def twice(x):\n    return x\n",
        "src/tiermoe/native/f.c": C,
        "tests/test_a.py": "def test_one(): ...\nclass TestIt:\n    def test_two(self): ...\n",
        "tests/deep/test_b.py": "def test_one(): ...\n",
    }.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    return root


def breakage(function: str, old: str, new: str, *tests: str) -> Breakage:
    return Breakage("name", function, old, new, tests)


@pytest.mark.parametrize(
    ("function", "old", "new", "there"),
    [
        ("LIMIT", "3", "4", "LIMIT = 4"),
        ("plain", "x+1", "x", "def plain(x):\n    return x\n"),
        ("Slots.place", "(1, 2)", "()", "for each in ():"),
        ("Slots.place", "key in ...", "key not in ...", "if key not in self.slots:"),
        ("Slots.place", "for each in (1, 2): ...", "for each in (1,): ...", "(1,):\n                self.look("),
        ("Slots.place", "self.add(0)", "pass", "except KeyError:\n                pass"),
        ("Slots.place", "self.add(0)", "a = 1\nb = 2", "a = 1\n                b = 2"),
        ("Slots", "self.look(..., ...)", "self.look(..., ..., 1)", "self.look(each, key, 1)"),
        ("tiermoe.a.slots:Slots", "self.look(..., ...)", "self.look(..., each)", "self.look(each, each)"),
        ("tiermoe.b:twice", "return x", "return 1", "return 1"),
        ("C:f", "x + 1", "x", "{ return x; }\n    return x;\n}\nint g(void) { return x + 1;"),
    ],
)  # fmt: skip
def test_python_is_compared_by_its_syntax_tree_and_c_by_its_text(
    function: str, old: str, new: str, there: str, tmp_path: Path
) -> None:
    assert there in breakage(function, old, new).broken(tree(tmp_path))[1]


@pytest.mark.parametrize(
    ("function", "old", "said"),
    [
        ("Slots.take", "x", r"no Slots\.take"),
        ("tiermoe.b:Slots.place", "x", "no tiermoe"),
        ("plain", "y", "this 0 times, not once: y"),
        ("Slots.place", "key", "this 4 times"),
        ("twice", "return x", "b.py, c.py.* this 2 times"),
        ("C:h", "x", "no C:h"),
        ("C:f", "return x", "this 2 times"),
    ],
)  # fmt: skip
def test_what_has_moved_on_is_refused(function: str, old: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        breakage(function, old, "1").broken(tree(tmp_path))


def test_tests_are_found_by_their_names(tmp_path: Path) -> None:
    tests = ("test_two", "tests/test_a.py", "tests/test_a.py::test_one", "test_one")
    both = ["tests/deep/test_b.py::test_one", "tests/test_a.py::test_one"]
    found = ["tests/test_a.py::test_two", "tests/test_a.py", "tests/test_a.py::test_one", *both]
    assert breakage("f", "x", "y", *tests).node_ids(tree(tmp_path)) == found
    for missing in ("test_three", "tests/test_c.py", "tests/deep/test_b.py::test_two"):
        with pytest.raises(ValueError, match=f"no test {missing}"):
            breakage("f", "x", "y", missing).node_ids(tree(tmp_path))
