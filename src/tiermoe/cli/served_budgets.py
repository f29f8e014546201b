"""Which budgets the models of a server can use: `python -m tiermoe.cli.served_budgets` plans them all in a process of
its own, since planning needs torch and the router has none. One JSON object in, one out."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from tiermoe.cli.output import cause
from tiermoe.errors import ConfigError


def ask(asked: dict[str, Any]) -> dict[str, Any]:
    """What `_answer` answers in another process. ConfigError where that fails."""
    words = [sys.executable, "-m", "tiermoe.cli.served_budgets"]
    done = subprocess.run(words, input=json.dumps(asked, default=str), stdout=subprocess.PIPE, text=True)
    answer = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"refused": "planning has failed"}
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    found: dict[str, Any] = answer
    return found


def _answer(models: list[str], options: dict[str, Any], kv_memory: str | None) -> dict[str, Any]:
    """The memory budget with its source, and for each model the budgets that it can use, or why it can use none."""
    import tiermoe.serve.app  # noqa: F401 — a server holds it when it plans
    from tiermoe.config import parse_size, settings
    from tiermoe.engine.budget import memory_budget

    asked = settings(**options)
    kv_bytes = None if kv_memory is None else parse_size(kv_memory, "--kv-memory")
    budget, source = memory_budget(asked)
    ranges = []
    for model in models:
        try:
            ranges.append(_range(model, asked, "batch" in options, kv_bytes))
        except Exception as error:
            ranges.append({"problem": cause(error)})
    return {"budget": budget, "source": source, "ranges": ranges}


def _range(model: str, asked: Any, batch_named: bool, kv_bytes: int | None) -> dict[str, Any]:
    from tiermoe.model.hf.hub import inspect_without_download
    from tiermoe.model.hf.tokenizers import load_tokenizer
    from tiermoe.serve.batch_limits import budget_range, require_decoder

    blueprint, download = inspect_without_download(model, asked.store)
    require_decoder(blueprint)
    tokenizer = load_tokenizer(blueprint.directory) if download is None else None
    found = asdict(budget_range(blueprint, asked, batch_named, kv_bytes))
    del tokenizer  # held until here: a server holds it when it plans
    return found


def main() -> None:
    from tiermoe.platform.process_memory import import_libraries

    import_libraries(own_process=True)
    try:
        answer = _answer(**json.load(sys.stdin))
    except Exception as error:
        answer = {"refused": cause(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
