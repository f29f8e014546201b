"""Run by path in the interpreter that holds llama-cpp-python: makes a GGUF, runs one case, or answers a prompt. Prints
one JSON object.

    PYTHON run_in_peer.py '{"task": "convert" | "run" | "answer", …}'

That interpreter has no tiermoe. The folder of the package is made importable under its name, and nothing that lies
beside it: this environment's numpy may be of another Python.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any


def _importable() -> None:
    here = Path(__file__).resolve()
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here.parent]
    package = types.ModuleType("tiermoe")
    package.__path__ = [str(here.parents[2])]
    sys.modules["tiermoe"] = package


def convert(job: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint to a GGUF of `type`."""
    from tiermoe.bench.llama.gguf_file import convert_to

    convert_to(Path(job["model"]), Path(job["out"]), job["type"], job["threads"])
    return {"bytes": Path(job["out"]).stat().st_size}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One case."""
    from tiermoe.bench.llama.measure import measure

    return measure(job)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """A prompt, greedily."""
    from tiermoe.bench.llama.measure import answer as answered

    return answered(job)


_TASKS = {"convert": convert, "run": run, "answer": answer}


def main() -> None:
    if "tiermoe" not in sys.modules:
        _importable()
    job = json.loads(sys.argv[1])
    try:
        print(json.dumps(_TASKS[job["task"]](job)))
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
