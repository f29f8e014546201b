"""Does the budget hold? `tiermoe run` in a memory cgroup equal to --memory, without swap: packing, and once packed.

    python -m benchmarks.budgets MODEL --budgets 1200MiB,1400MiB,3GiB [--dense none,16,8,4] [--prompt-tokens 600,4000]

MODEL is a directory or a GGUF file. For each budget, precision of the dense layers (none: the option left out) and
length of the prompt a run begins without a store and a second one finds what the first left. Prints one JSON object a
run: how it ended (answered, refused by the plan with its message, killed), the process's peak against the budget, and
its speed; then a table on standard error. `--later` takes a packed store and leaves the first runs out.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rounds import parser_of, print_table
from tiermoe.config import parse_size
from tiermoe.lab.bench.child import joining, last_object, memory_group, usage

_TEXT = "Once upon a time there was a king who lived in a great house by the sea, and he had a little dog. "
_REFUSAL = "are too little"  # what the plan's messages have in common


def prompt_of(model: Path, tokens: int) -> str:
    """A text of so many tokens."""
    from tiermoe.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    ids = tokenizer(_TEXT * (1 + tokens // 8))["input_ids"][:tokens]
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def command(args: argparse.Namespace, budget: str, dense: str, store: Path, prompt: str) -> list[str]:
    words = [sys.executable, "-m", "tiermoe", "run", str(args.model), prompt, "--raw", "--json", "--memory", budget]
    words += ["--store", str(store), "--max-tokens", str(args.tokens), "--threads", str(args.threads)]
    return words + ([] if dense == "none" else ["--dense-bits", dense])


def measure(words: Sequence[str], limit: int) -> dict[str, Any]:
    """How a command ended in a cgroup of `limit` bytes."""
    with memory_group(limit) as (version, group):
        done = subprocess.run(joining(group, words), capture_output=True, text=True, check=False)
        _, kills = usage(version, group)
    said = done.stderr.strip().splitlines()
    if done.returncode == 0:
        found = last_object(done.stdout)
        names = ("peak_memory_bytes", "memory_budget_bytes", "prompt_tokens", "ttft_s", "decode_tok_s", "load_s",
                 "hit_rate", "kernels")  # fmt: skip
        return {"ended": "answered", "oom_kills": kills, **{name: found.get(name) for name in names}}
    if kills or done.returncode < 0:
        return {"ended": "killed", "oom_kills": kills, "exit": done.returncode}
    message = said[-1] if said else ""
    return {"ended": "refused" if _REFUSAL in done.stderr else "failed", "oom_kills": 0, "message": message}


def runs_of(args: argparse.Namespace, budget: str, dense: str, tokens: int, prompt: str) -> list[dict[str, Any]]:
    """The first run, in an empty store, and the second; or one in the store that is given. prompt: of `tokens`."""
    limit = parse_size(budget)
    with tempfile.TemporaryDirectory(prefix="budgets-", dir=args.scratch) as folder:
        if args.later:
            chosen = {"later": args.later}
        else:
            chosen = {"first": Path(folder) / "store", "second": Path(folder) / "store"}
        found: list[dict[str, Any]] = []
        for run, store in chosen.items():
            if found and found[0]["ended"] != "answered":
                break
            result = measure(command(args, budget, dense, store, prompt), limit)
            found.append({"budget": budget, "dense": dense, "prompt": tokens, "run": run, **result})
            print(json.dumps(found[-1]), flush=True)
    return found


def row_of(found: dict[str, Any]) -> list[str]:
    """A line of the table."""
    peak = found.get("peak_memory_bytes")
    shown = f"{peak / 2**20:.0f} MiB" if peak else ""
    within = "" if not peak else "yes" if peak <= found["memory_budget_bytes"] else "no"
    said = found.get("message", "")
    return [found["budget"], found["dense"], str(found["prompt"]), found["run"], found["ended"], shown, within, said]


def main() -> None:
    top = parser_of(__doc__)
    top.add_argument("model", type=Path)
    top.add_argument("--budgets", default="450MiB,700MiB,1200MiB,2000MiB")
    top.add_argument("--dense", default="none,16,8,4", help="precisions of the dense layers; none: no option")
    top.add_argument("--prompt-tokens", default="600", help="lengths of the prompt")
    top.add_argument("--tokens", type=int, default=16)
    top.add_argument("--threads", type=int, default=2)
    top.add_argument("--scratch", type=Path, help="where stores are packed and removed again")
    top.add_argument("--later", type=Path, metavar="STORE", help="a packed store; no first runs")
    args = top.parse_args()
    prompts = {tokens: prompt_of(args.model, tokens) for tokens in map(int, args.prompt_tokens.split(","))}
    found = [
        run
        for budget in args.budgets.split(",")
        for dense in args.dense.split(",")
        for tokens, prompt in prompts.items()
        for run in runs_of(args, budget, dense, tokens, prompt)
    ]
    head = ("budget", "dense", "prompt", "run", "ended", "peak", "within", "message")
    print_table(head, [row_of(each) for each in found])
    sys.exit(any(each["ended"] in ("killed", "failed") or "no" in row_of(each)[6:7] for each in found))


if __name__ == "__main__":
    main()
