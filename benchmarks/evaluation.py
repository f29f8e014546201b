"""lm-eval on a model, in this process and over HTTP, side by side.

    python -m benchmarks.evaluation MODEL --data FOLDER [--tasks piqa,winogrande,wikitext] [--limit 100]

FOLDER has `piqa/valid.jsonl` with `piqa/valid-labels.lst`, `winogrande/winogrande.jsonl` and `wikitext2/wiki.test.raw`.
First `tiermoe.load` gives the model to lm-eval's transformers class, then `tiermoe serve` answers its
`local-completions`. Prints one JSON object, and a table on standard error; the exit code is 1 where a figure differs in
what is shown. Both are told to see the same tokens. Needs `pip install 'tiermoe[eval]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import httpx

from benchmarks.rounds import at_least_one, parser_of, print_table
from benchmarks.serving import serving
from tiermoe.config import Settings
from tiermoe.engine.request_loop import scored_tokens
from tiermoe.errors import ConfigError, TiermoeError
from tiermoe.lab.measure.harness import begins, hosted, results_of
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.hf.hub import resolve_model
from tiermoe.model.tokenizer import load_tokenizer

TASKS = ("piqa", "winogrande", "wikitext")
LOADING_S = 3600  # packing included
DIGITS = 4
"""Behind the point, as lm-eval shows them."""

MORE = 2
"""Tokens of context beside a window's: the one that stands before it, and the one that a server generates."""

Figures = dict[str, dict[str, float]]
"""Task → metric → its value."""


@contextmanager
def over_http(model: str, address: str, length: int, together: int) -> Iterator[Any]:
    """lm-eval's class for a completions endpoint. together: prompts a request."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    directory = resolve_model(model)
    yield LocalCompletionsAPI(
        model=name_at(address),
        base_url=f"{address}/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=str(directory),
        add_bos_token=begins(load_tokenizer(directory)),
        batch_size=together,
        max_length=length + MORE,
        timeout=3600,
    )


def name_at(address: str) -> str:
    """What a server's model is called."""
    name: str = httpx.get(f"{address}/v1/models").raise_for_status().json()["data"][0]["id"]
    return name


def measure(scorer: AbstractContextManager[Any], tasks: list[str], data: str, limit: int | None) -> Figures:
    """What lm-eval finds."""
    with scorer as model:
        return results_of(model, tasks, data, limit)


def beside(first: Figures, second: Figures) -> list[tuple[str, str, str, str, bool]]:
    """(task, metric, both as they are shown, whether they are equal so)."""
    rows = []
    for task, metrics in first.items():
        for name, value in metrics.items():
            shown = [f"{each:.{DIGITS}f}" for each in (value, second[task][name])]
            rows.append((task, name, *shown, shown[0] == shown[1]))
    return rows


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    named = ("memory", "bits", "dense_bits", "chunk", "threads")
    options = {name: getattr(args, name) for name in named if getattr(args, name) is not None}
    options.setdefault("chunk", same_chunk(args.model))
    asked = partial(measure, tasks=args.tasks, data=args.data, limit=args.limit)
    ours = asked(hosted(args.model, args.length, {**options, "context": args.length + MORE}))
    with ExitStack() as stack:
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        words = [args.model, "--context", args.length + MORE, "--max-batch", 1, *words]
        address = args.address or stack.enter_context(serving(words, LOADING_S)).address
        theirs = asked(over_http(args.model, address, args.length, args.together))
    rows = beside(ours, theirs)
    print_table(("task", "metric", "in process", "over HTTP", ""), [(*row[:4], "" if row[4] else "!") for row in rows])
    return {"model": args.model, "limit": args.limit, "length": args.length, **options,
            "in_process": ours, "over_http": theirs, "equal": all(row[4] for row in rows)}  # fmt: skip


def same_chunk(model: str) -> int:
    """Tokens of a prompt that run at once in both: a server that scores takes no more of them than it keeps logits of,
    and a chunk of other length may round otherwise."""
    vocabulary: int = inspect_model(resolve_model(model), model).config.vocab_size
    return min(Settings().chunk, scored_tokens(vocabulary))


def tasks_of(text: str) -> list[str]:
    """Of 'piqa,wikitext'. ValueError where one is none of `TASKS`."""
    tasks = text.split(",")
    if not set(tasks) <= set(TASKS):
        raise ValueError(text)
    return tasks


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", default=os.environ.get("TIERMOE_EVAL_DATA"), help="default: TIERMOE_EVAL_DATA")
    parser.add_argument("--tasks", type=tasks_of, default=list(TASKS), help=f"default {','.join(TASKS)}")
    parser.add_argument("--limit", type=at_least_one, help="documents of each task; default: all")
    parser.add_argument("--length", type=at_least_one, default=1022, help="tokens of a window; default 1022")
    parser.add_argument("--together", type=at_least_one, default=8, help="prompts a request over HTTP; default 8")
    parser.add_argument("--address", help="of a server that runs, like http://127.0.0.1:8000; default: its own")
    parser.add_argument("--memory")
    parser.add_argument("--bits", type=int)
    parser.add_argument("--dense-bits", type=int)
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    try:
        if not args.data:
            raise ConfigError("no data is named: --data FOLDER, or TIERMOE_EVAL_DATA")
        result = evaluate(args)
    except TiermoeError as error:
        parser.exit(2, f"error: {error}\n")
    except ImportError as error:
        parser.exit(2, f"error: this needs {error.name}: pip install 'tiermoe[eval]'\n")
    print(json.dumps(result))
    sys.exit(0 if result["equal"] else 1)


if __name__ == "__main__":
    main()
