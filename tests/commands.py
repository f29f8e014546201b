"""Runs a `tiermoe` command in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tiermoe.cli.main import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def cause(self) -> str:
        """The one line that an error is told in: exit code 2, nothing like a traceback, nothing after it."""
        assert self.code == 2, self
        assert "Traceback" not in self.err
        lines = self.err.splitlines()
        assert sum(line.startswith("tiermoe: ") for line in lines) == 1, self.err
        assert lines[-1].startswith("tiermoe: "), self.err
        return lines[-1]


Command = Callable[..., Outcome]


def command_runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """A function (*words, stdin="") → Outcome. stdin: text, or bytes that need not be any."""

    def command(*words: object, stdin: str | bytes = "") -> Outcome:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["tiermoe", *map(str, words)])
        told = io.StringIO(stdin) if isinstance(stdin, str) else io.TextIOWrapper(io.BytesIO(stdin))
        monkeypatch.setattr(sys, "stdin", told)
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), out, err)

    return command
