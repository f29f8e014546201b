"""Runs all cases, alternating, and keeps what has been run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiermoe.bench.cases import Case, Condition, alternating
from tiermoe.bench.engines import BenchEngine
from tiermoe.errors import ConfigError, TiermoeError


@dataclass(slots=True)
class Measured:
    """A case's result in each round that was run, or why it has none."""

    case: Case
    rounds: dict[int, dict[str, Any]] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One run that is done."""

    case: Case
    round: int
    done: int
    total: int
    result: dict[str, Any]


Ids = Callable[[Condition], Path]
"""Condition → the .npy file of the token ids that every engine is fed."""


def plan(engines: Sequence[BenchEngine], conditions: Sequence[Condition]) -> list[list[tuple[BenchEngine, Case]]]:
    """For each condition the engines that it says something about, with their cases."""
    return [
        [(engine, Case(engine.name, engine.preset, condition)) for engine in engines if engine.takes(condition)]
        for condition in conditions
    ]


def measure(
    planned: Sequence[Sequence[tuple[BenchEngine, Case]]], rounds: int, ids: Ids, journal: Journal, rows: list[Measured]
) -> Iterator[Step]:
    """Runs every case `rounds` times, condition by condition, its engines alternating; yields each run as it ends, and
    keeps it in `rows` (where an interrupted measurement finds what there is). What the journal holds is not run again,
    and neither is a case that failed."""
    total, done = rounds * sum(map(len, planned)), 0
    for group in planned:
        measured = {case: Measured(case) for _, case in group}
        rows += measured.values()
        for number, (engine, case) in alternating(group, rounds):
            done += 1
            row = measured[case]
            if row.error is not None:
                continue
            result = journal.find(case, number)
            if result is None:
                result = _run(engine, case, ids)
                journal.add(case, number, result)
            if "error" in result:
                row.error = result["error"]
            else:
                row.rounds[number] = result
            yield Step(case, number, done, total, result)


def _run(engine: BenchEngine, case: Case, ids: Ids) -> dict[str, Any]:
    try:
        return engine.run(case.condition, ids(case.condition))
    except TiermoeError as error:
        return {"error": str(error)}


class Journal:
    """A file of JSON lines to which runs are appended as they end, and from which a later call goes on. key: what the
    runs hold for (model, text, threads, precisions); path: None keeps nothing. ConfigError for a file of other runs, or
    one that cannot be read or written."""

    def __init__(self, path: Path | None, key: dict[str, Any]) -> None:
        self._path = path
        self._known: dict[tuple[str, int], dict[str, Any]] = {}
        if path is None:
            return
        try:
            self._read(path, key)
        except OSError as error:
            raise ConfigError(f"the file {path} cannot be used: {error.strerror}; name another with --out") from error

    def _read(self, path: Path, key: dict[str, Any]) -> None:
        lines = path.read_text().splitlines() if path.exists() else []
        if not lines:
            path.write_text(json.dumps({"measured": key}) + "\n")
            return
        whole = list(_objects(lines))
        if not whole or "measured" not in whole[0]:
            raise ConfigError(f"{path} is no file of tiermoe bench; name another with --out")
        if whole[0]["measured"] != key:
            other = [name for name in key if whole[0]["measured"].get(name) != key[name]]
            raise ConfigError(f"{path} holds runs with another {', '.join(other)}; name another file with --out")
        for line in whole[1:]:
            self._known[json.dumps(line["case"], sort_keys=True), line["round"]] = line["result"]
        if len(whole) < len(lines):  # cut short while it was written
            path.write_text("".join(json.dumps(line) + "\n" for line in whole))

    def find(self, case: Case, number: int) -> dict[str, Any] | None:
        """The result of a round that the file holds."""
        return self._known.get((json.dumps(case.as_dict(), sort_keys=True), number))

    def add(self, case: Case, number: int, result: dict[str, Any]) -> None:
        """Appends a run."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"case": case.as_dict(), "round": number, "result": result}) + "\n")


def _objects(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The objects up to the first line that is none."""
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            return
        if not isinstance(found, dict):
            return
        yield found
