"""Values that take long to measure, kept as they come: a run that was killed goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path


class Measured:
    """Name → value, of what is described by `made_from`; appended to the file `path` (None: kept in memory alone), one
    JSON object a line. Lines of other conditions and a line that was cut short are passed over and stay."""

    def __init__(self, path: Path | None, made_from: str) -> None:
        self._path, self._made_from = path, made_from
        self._values: dict[str, float] = {}
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            file.seek(0)
            content = file.read()
            if content and not content.endswith(b"\n"):
                file.write(b"\n")
        for line in content.splitlines():
            self._read(line)

    def get(self, name: str) -> float | None:
        """The value, None where it is yet to be measured."""
        return self._values.get(name)

    def add(self, name: str, value: float) -> None:
        """Keeps a value, in the file too before this returns."""
        self._values[name] = value
        if self._path is not None:
            with open(self._path, "a") as file:
                file.write(json.dumps({"of": self._made_from, "name": name, "value": value}) + "\n")

    def _read(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            if entry["of"] == self._made_from:
                self._values[str(entry["name"])] = float(entry["value"])
        except (ValueError, KeyError, TypeError):
            return
