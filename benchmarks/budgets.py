"""Does the budget hold? One story at several --memory budgets, free and in a memory cgroup of that very size.

    python -m benchmarks.budgets MODEL [--budgets 450MiB,700MiB,1200MiB,2000MiB --dense-bits 4 --tokens 48]

Prints for each budget: peak resident set against the budget, how the run in the cgroup ended (swap off), whether its
text is the same, the bytes read, and what a miss costs.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.llamacpp import last_object
from benchmarks.memory_limit import parse_size, run_limited

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "Once upon a time there was a king who lived in a great house by the sea, and he had"


def command(args: argparse.Namespace, budget: str) -> list[str]:
    words = [sys.executable, "-m", "tiermoe", "run", str(args.model), PROMPT, "--json", "--memory", budget]
    words += [
        "--max-tokens",
        str(args.tokens),
        "--dense-bits",
        str(args.dense_bits),
        "--threads",
        str(args.threads),
    ]
    return [*words, "--temperature", "0.8", "--seed", "7"]


def measure(args: argparse.Namespace, budget: str) -> dict[str, Any]:
    """One budget: a free run, then the same run in a cgroup."""
    free = subprocess.run(command(args, budget), capture_output=True, text=True, check=False)
    if free.returncode:
        return {"budget": budget, "refused": free.stderr.strip().splitlines()[-1]}
    outcome = last_object(free.stdout)
    limited, output = run_limited(command(args, budget), parse_size(budget), [], subprocess.PIPE)
    inside = last_object(output) if limited.returncode == 0 else {}
    return {
        "budget": budget,
        "peak_mib": round(outcome["peak_memory_bytes"] / 2**20, 1),
        "within": outcome["peak_memory_bytes"] <= outcome["memory_budget_bytes"],
        "cgroup_exit": limited.returncode,
        "cgroup_oom_kills": limited.oom_kills,
        "cgroup_peak_mib": round((limited.peak_bytes or 0) / 2**20, 1),
        "same_text": inside.get("text") == outcome["text"],
        "decode_tok_s": round(inside.get("decode_tok_s", 0.0), 2),
        "hit_rate": round(inside.get("hit_rate", 0.0), 3),
        "bytes_read": inside.get("bytes_read"),
        "bytes_per_miss": inside["bytes_read"] / inside["expert_misses"] if inside else None,
    }


def main() -> None:
    top = argparse.ArgumentParser(prog="python -m benchmarks.budgets", description=__doc__)
    top.formatter_class = argparse.RawDescriptionHelpFormatter
    top.add_argument("model", type=Path)
    top.add_argument("--budgets", default="450MiB,700MiB,1200MiB,2000MiB")
    top.add_argument("--dense-bits", type=int, default=4)
    top.add_argument("--tokens", type=int, default=48)
    top.add_argument("--threads", type=int, default=2)
    args = top.parse_args()
    for budget in args.budgets.split(","):
        print(json.dumps(measure(args, budget)), flush=True)


if __name__ == "__main__":
    main()
