"""One command of tiermoe in this process, after what it imports: its JSON object with `imports_s` and `process_s`."""

import contextlib
import importlib
import io
import json
import sys
from typing import Any

from tiermoe.lab.bench.run_peer import since_start

_IMPORTED = ("model.hf.blueprint", "model.hf.hub", "engine.load", "engine.generate")  # what `run` imports as it goes


def answer(words: list[str]) -> dict[str, Any]:
    """words: what follows `tiermoe` on the command line, with `--json`. Raises SystemExit as the command does."""
    from tiermoe.cli.main import main as command
    from tiermoe.platform import process_memory

    process_memory.import_libraries()
    for name in _IMPORTED:
        importlib.import_module(f"tiermoe.{name}")
    imports_s = since_start()
    sys.argv[1:] = words
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            command()
        except SystemExit as ended:
            if ended.code:
                raise
    found: dict[str, Any] = json.loads(out.getvalue().splitlines()[-1])
    return {**found, "imports_s": imports_s, "process_s": since_start()}


if __name__ == "__main__":
    print(json.dumps(answer(json.loads(sys.argv[1])["words"])))
