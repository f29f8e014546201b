"""A person's first minutes: `tiermoe run MODEL PROMPT` without options, and llama.cpp doing the same.

    python -m benchmarks.first_run MODEL --gguf F.gguf --peer-python PYTHON

In every round each engine answers twice, each time in a process of its own: `cold`, its files dropped from the page
cache, and `again`, as that left them. What counts is the time from the beginning of loading to the last of the answer's
tokens, greedy, imports apart (`imports_s`; `process_s` is everything). llama.cpp has its own defaults: its file mapped,
its weights repacked. The expert store is made before, where it is not there. Prints one JSON object, ratios
being llama.cpp's seconds over ours within a round.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rounds import about, at_least_one, parser_of, print_table, say, shown
from tiermoe.errors import TiermoeError
from tiermoe.lab.bench.cases import LLAMA, OURS, alternating
from tiermoe.lab.bench.child import Bounds, CaseFailed, drop_from_page_cache, run_child
from tiermoe.lab.bench.engines import Common, LlamaCpp
from tiermoe.lab.bench.session import Subject
from tiermoe.lab.bench.summary import spread
from tiermoe.platform.machine import processors

STARTS = ("cold", "again")
FIGURES = ("seconds", "load_s", "ttft_s", "decode_tok_s", "imports_s", "process_s", "peak_memory_bytes")
Run = Callable[[], dict[str, Any]]


def ours(model: Path, prompt: str, tokens: int, timeout: float) -> Run:
    """The command, after its imports."""
    job = {"words": ["run", str(model), prompt, "--max-tokens", str(tokens), "--json"]}

    def run() -> dict[str, Any]:
        found = run_child([sys.executable, "-m", "benchmarks.first_run_child", json.dumps(job)], Bounds(None, timeout))
        made = found["completion_tokens"]
        if made < tokens:
            raise CaseFailed(f"the answer ended after {made} of {tokens} tokens; ask another --prompt or less --tokens")
        seconds = found["load_s"] + found["ttft_s"] + (made - 1) / found["decode_tok_s"]
        return {**found, "seconds": seconds}

    return run


def measure(
    runs: dict[str, Run], files: dict[str, Sequence[Path]], rounds: int, say: Callable[[str], None]
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Start → engine → the figures of every round. Engines alternate, every other round backwards."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {start: {name: [] for name in runs} for start in STARTS}
    for number, name in alternating(list(runs), rounds):
        drop_from_page_cache(files[name])
        for start in STARTS:
            result = runs[name]()
            found[start][name].append(result)
            say(f"[{number + 1}/{rounds}] {name}, {start}: {result['seconds']:.2f} s")
    return found


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Engine → figure → {median, low, high}, and the ratios."""
    said: dict[str, Any] = {
        name: {figure: spread([run[figure] for run in runs]) for figure in FIGURES} for name, runs in found.items()
    }
    for figure in ("seconds", "process_s"):
        pairs = zip(found[OURS], found[LLAMA], strict=True)
        said[f"{figure}_ratio"] = spread([theirs[figure] / mine[figure] for mine, theirs in pairs])
    return said


def first_run(args: argparse.Namespace) -> dict[str, Any]:
    from tiermoe.engine.generate import encode_prompt
    from tiermoe.model.tokenizer import load_tokenizer

    def progress(what: str, done: int, total: int) -> None:
        if done == 0:
            say(what)

    subject = Subject(str(args.model), args.prompt)
    files = subject.ensure_packed("default", {}, progress)
    base = subject.store_root.parent
    with tempfile.TemporaryDirectory(prefix="first-run-", dir=base) as folder:
        common = Common(subject.directory, processors(), args.timeout, Path(folder))
        peer = LlamaCpp(common, args.gguf, args.peer_python)
        if (reason := peer.missing()) is not None:
            raise CaseFailed(reason)
        assert peer.gguf is not None
        ids = encode_prompt(load_tokenizer(subject.directory), args.prompt).numpy()
        prompt = Path(folder) / "prompt.npy"
        np.save(prompt, ids)
        runs: dict[str, Run] = {
            OURS: ours(subject.directory, args.prompt, args.tokens, args.timeout),
            LLAMA: lambda: peer.answer(prompt, args.tokens),
        }
        found = measure(runs, {OURS: files, LLAMA: (peer.gguf,)}, args.rounds, say)
    return {
        "model": subject.name,
        "gguf": peer.gguf.name,
        "prompt_tokens": ids.shape[1],
        "tokens": args.tokens,
        **about(args.rounds, processors()),
        **{start: summary(found[start]) for start in STARTS},
    }


def table(result: dict[str, Any]) -> None:
    rows = []
    for start in STARTS:
        for name in (OURS, LLAMA):
            figures = result[start][name]
            cells = [shown(figures[figure]) for figure in FIGURES[:-1]]
            rows.append([f"{name}, {start}", *cells, shown(result[start]["seconds_ratio"]) if name == OURS else ""])
    print_table(["", *FIGURES[:-1], "times as fast"], rows)


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", default="Once upon a time there was a little")
    parser.add_argument("--tokens", type=at_least_one, default=96, help="of the answer; default 96")
    parser.add_argument("--gguf", type=Path, help="the model for llama.cpp; default: MODEL, where it is one")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has llama-cpp-python")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one run may take; default 600")
    args = parser.parse_args()
    if args.tokens < 2:
        parser.error("an answer of one token has no decoding; --tokens must be at least 2")
    try:
        result = first_run(args)
    except TiermoeError as error:
        sys.exit(f"first_run: {error}")
    table(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
