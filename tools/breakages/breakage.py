"""A deliberate breakage: a function by its name, and a change of its code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = "src/tiermoe"
TESTS = "tests"


@dataclass(frozen=True)
class Breakage:
    """`old` becomes `new` at one place in `function`; one of `tests` must fail then. Files, layout and comments may
    change without the breakage."""

    name: str
    # Qualified name of a function (`Pools.place`), a class or a module's constant (`LIMIT`), anywhere in SOURCES.
    # `tiermoe.package.module:NAME` looks in one module, `C:NAME` in the C sources.
    function: str
    # Python: an expression, or statements that follow each other, in any layout. `...` fits any expression; alone in a
    # block it fits the whole block. C: a part of the function's text.
    old: str
    # `...` stands for what it fitted in `old`, in order.
    new: str
    # Names of test functions, in any file, or ids of pytest: `tests/test_a.py`, `tests/test_a.py::test_b`.
    tests: tuple[str, ...]

    def broken(self, root: Path) -> tuple[Path, str]:
        """The file to change in the tree at `root`, and its text with the change. ValueError where `function` does not
        exist or does not have `old` exactly once: the code has moved on, and this breakage must follow."""
        if self.function.startswith("C:"):
            return self._broken_c(root, self.function.removeprefix("C:"))
        module, _, name = self.function.rpartition(":")
        paths = [path for path in _python_names(root).get(name, ()) if module in ("", _module(root, path))]
        changed = []
        for path in paths:
            tree = ast.parse(path.read_text())
            change = _Change(self.old, self.new)
            for defined, node in _definitions(tree):
                if defined == name:
                    change.visit(node)
            changed += [(path, tree)] * change.count
        self._check(paths, len(changed))
        path, tree = changed[0]
        return path, ast.unparse(ast.fix_missing_locations(tree)) + "\n"

    def _broken_c(self, root: Path, name: str) -> tuple[Path, str]:
        functions = [(path, text) for path, defined, text in _c_functions(root) if defined == name]
        found = [function for function in functions for _ in range(function[1].count(self.old))]
        self._check([path for path, _ in functions], len(found))
        path, text = found[0]
        return path, path.read_text().replace(text, text.replace(self.old, self.new))

    def _check(self, paths: list[Path], places: int) -> None:
        if not paths:
            raise ValueError(f"{self.name}: no {self.function} in {SOURCES}")
        if places != 1:
            files = ", ".join(path.name for path in paths)
            raise ValueError(f"{self.name}: {self.function} ({files}) has this {places} times, not once: {self.old}")

    def node_ids(self, root: Path) -> list[str]:
        """`tests` as pytest takes them. ValueError for a test that the tree at `root` does not have."""
        ids: list[str] = []
        for test in self.tests:
            file, _, name = test.partition("::") if "/" in test else ("", "", test)
            function = name.partition("[")[0]  # without parameters
            found = [path for path in _test_names(root).get(function, ()) if file in ("", path)]
            if not found:
                raise ValueError(f"{self.name}: no test {test}")
            ids += [f"{path}::{name}" if name else path for path in found]
        return ids


class _Change(ast.NodeTransformer):
    """Replaces code in the nodes that it visits, and counts the places."""

    def __init__(self, old: str, new: str) -> None:
        self.count = 0
        self._old, self._new = ast.parse(old).body, ast.parse(new).body
        # an expression that becomes an expression is found anywhere; otherwise whole statements are replaced
        ends = [(part[0], part[-1]) for part in (self._old, self._new) if part]
        self._values = [first.value for first, last in ends if first is last and isinstance(first, ast.Expr)]

    def visit(self, node: ast.AST) -> Any:
        found: list[Any] = []
        if len(self._values) == 2:
            old, new = self._values
            if isinstance(node, ast.expr) and _fits(old, node, found):
                self.count += 1
                return _filled(new, found)
        else:
            for field in ("body", "orelse", "finalbody"):
                block = getattr(node, field, None)
                if isinstance(block, list):
                    setattr(node, field, list(self._replaced(block)))
        return self.generic_visit(node)

    def _replaced(self, block: list[ast.stmt]) -> Iterator[ast.stmt]:
        at = 0
        while at < len(block):
            found: list[Any] = []
            part = block[at : at + len(self._old)]
            if _fits(self._old, part, found):
                self.count += 1
                yield from _filled(self._new, found)
                at += len(part)
            else:
                yield block[at]
                at += 1


def _is_any(node: Any) -> bool:
    """Whether a node is `...`, as an expression or as a statement."""
    value = node.value if isinstance(node, ast.Expr) else node
    return isinstance(value, ast.Constant) and value.value is ...


def _fits(pattern: Any, node: Any, found: list[Any]) -> bool:
    """Whether a node, a list of nodes or a field equals a pattern. found: gets what each `...` fitted."""
    block = isinstance(pattern, list) and len(pattern) == 1 and isinstance(pattern[0], ast.Expr) and _is_any(pattern[0])
    if block or (_is_any(pattern) and isinstance(node, ast.expr)):
        found.append(node)
        return True
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, list):
        return len(pattern) == len(node) and all(_fits(a, b, found) for a, b in zip(pattern, node, strict=True))
    if isinstance(pattern, ast.AST):
        fields = (field for field in pattern._fields if field not in ("ctx", "kind", "type_comment"))
        return all(_fits(getattr(pattern, field), getattr(node, field), found) for field in fields)
    return bool(pattern == node)


def _filled(new: Any, found: list[Any]) -> Any:
    """A copy of a node or a list of nodes, with what was `found` in place of each `...`."""
    if _is_any(new):
        return found.pop(0)
    if isinstance(new, list):
        filled = [_filled(each, found) for each in new]
        return [node for each in filled for node in (each if isinstance(each, list) else [each])]
    if isinstance(new, ast.AST):
        return type(new)(**{name: _filled(value, found) for name, value in ast.iter_fields(new)})
    return new


def _definitions(node: ast.AST, within: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions, classes and a module's constants, each with its qualified name. A definition within an `if` or a `try`
    counts as one beside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield within + child.name, child
            yield from _definitions(child, f"{within}{child.name}.")
        elif isinstance(child, ast.Assign | ast.AnnAssign) and not within:
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from ((each.id, child) for each in targets if isinstance(each, ast.Name))
        elif isinstance(child, ast.stmt | ast.excepthandler):
            yield from _definitions(child, within)


@cache
def _python_names(root: Path) -> dict[str, list[Path]]:
    """Files that define each qualified name."""
    names: dict[str, list[Path]] = {}
    for path in sorted((root / SOURCES).rglob("*.py")):
        for name in dict.fromkeys(name for name, _ in _definitions(ast.parse(path.read_text()))):
            names.setdefault(name, []).append(path)
    return names


def _module(root: Path, path: Path) -> str:
    parts = path.relative_to(root / SOURCES).with_suffix("").parts
    return ".".join((Path(SOURCES).name, *(part for part in parts if part != "__init__")))


@cache
def _c_functions(root: Path) -> list[tuple[Path, str, str]]:
    """Every C function: its file, name, and text from its name to the closing brace."""
    found = []
    for path in sorted((root / SOURCES).rglob("*.[ch]")):
        text = path.read_text()
        for begin in re.finditer(r"^[A-Za-z_][\w\s*]*?\b(\w+)\([^;{}]*\)\s*\{", text, re.MULTILINE):
            end, depth = begin.end(), 1
            while depth:
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                end += 1
            found.append((path, begin[1], text[begin.start(1) : end]))
    return found


@cache
def _test_names(root: Path) -> dict[str, list[str]]:
    """Test files below `root` that have each test function; under "" all of them."""
    names: dict[str, list[str]] = {}
    for path in sorted((root / TESTS).rglob("test_*.py")):
        file = path.relative_to(root).as_posix()
        for name in ("", *re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE)):
            names.setdefault(name, []).append(file)
    return names
