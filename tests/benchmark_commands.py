"""What the tests of benchmarks share: their commands, run in this process."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

Printed = Callable[..., tuple[dict[str, Any], str]]


def command_of(module: str) -> Callable[[], None]:
    """The `main` of a module."""
    found: Callable[[], None] = importlib.import_module(module).main
    return found


def benchmark_runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """(module, words) → the one JSON object that it prints, and standard error."""

    def run(module: str, *words: object) -> tuple[dict[str, Any], str]:
        monkeypatch.setattr(sys, "argv", [module, *map(str, words)])
        command_of(module)()
        out, err = capsys.readouterr()
        (line,) = out.splitlines()
        return json.loads(line), err

    return run
