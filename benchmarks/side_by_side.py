"""tiermoe and llama.cpp on the same model and tokens, alternating, in one run: medians, spread and ratios.

    python -m benchmarks.side_by_side MODEL Q4_K_M.gguf --peer-python PYTHON [--memory 700M] [--rounds 3]

Both decode the same text's tokens one at a time with the same threads. With --memory both run in a memory cgroup
of that size with a cold page cache: llama.cpp maps its file, tiermoe is given the same number as its --memory.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.llamacpp import PeerFailed, decode, last_object, save_ids
from benchmarks.memory_limit import CannotLimit, parse_size, run_limited

ROOT = Path(__file__).resolve().parents[1]


def ours(args: argparse.Namespace, ids: Path) -> dict[str, Any]:
    """One run of benchmarks.ours in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.ours", "decode", str(args.model), "--ids", str(ids)]
    command += ["--prompt", str(args.prompt), "--tokens", str(args.tokens), "--threads", str(args.threads)]
    command += ["--dense-bits", str(args.dense_bits), "--bits", "4"]
    command += ["--preset", args.preset]
    if args.memory is None:
        done = subprocess.run([*command, "--warm"], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
        return last_object(done.stdout)
    limited, output = run_limited([*command, "--memory", str(args.memory)], args.memory, [], subprocess.PIPE)
    if limited.returncode:
        raise PeerFailed(f"tiermoe ended with {limited.returncode} ({limited.oom_kills} kills for memory)")
    return {**last_object(output), "cgroup_peak_bytes": limited.peak_bytes}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    mine, theirs = [], []
    with tempfile.TemporaryDirectory() as directory:
        ids = save_ids(args, directory, args.prompt + args.tokens)
        for _ in range(args.rounds):
            theirs.append(decode(args)["decode_tok_s"])
            result = ours(args, ids)
            mine.append(result["decode_tok_s"])
            print(f"llama.cpp {theirs[-1]:.2f}, tiermoe {mine[-1]:.2f} tok/s", file=sys.stderr)
    return {
        "machine": f"{platform.machine()}, {platform.platform()}",
        "command": " ".join(sys.argv),
        "memory_bytes": args.memory,
        "dense_bits": args.dense_bits,
        "llama_cpp_tok_s": {"median": median(theirs), "all": theirs},
        "tiermoe_tok_s": {"median": median(mine), "all": mine},
        "ratio": median(mine) / median(theirs),
        "tiermoe_last_run": result,
    }


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.side_by_side", description=__doc__)
    top.formatter_class = argparse.RawDescriptionHelpFormatter
    top.add_argument("model", type=Path)
    top.add_argument("gguf", type=Path)
    top.add_argument("--peer-python", default=sys.executable)
    top.add_argument("--text", type=Path, default=ROOT / "data" / "heldout.txt")
    top.add_argument("--offset", type=int, default=0)
    top.add_argument("--prompt", type=int, default=32)
    top.add_argument("--tokens", type=int, default=64)
    top.add_argument("--threads", type=int, default=2)
    top.add_argument("--rounds", type=int, default=3)
    top.add_argument("--memory", type=parse_size)
    top.add_argument("--dense-bits", type=int, default=4)
    top.add_argument("--preset", default="default")
    top.set_defaults(feed="text", attention="default", repack=False)
    return top


def main() -> None:
    try:
        print(json.dumps(compare(parser().parse_args()), indent=1))
    except (CannotLimit, PeerFailed) as error:
        sys.exit(f"side_by_side: {error}")


if __name__ == "__main__":
    main()
