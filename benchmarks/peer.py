"""What runs in the interpreter that holds llama-cpp-python: each command prints one JSON object.

`benchmarks.llamacpp` starts it as a process, so that the project's environment needs no peer and llama.cpp's memory is
apart. Token ids come in as .npy files.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.surprisals import Ids, surprisals
from tiermoe.lab.bench.run_peer import ATTENTION, LlamaEngine

_WARNING, _ERROR = 3, 4  # ggml_log_level


def score(args: argparse.Namespace) -> None:
    """The sum and the number of each window's surprisals, saved. Every window starts with an empty KV cache."""
    engine = LlamaEngine(args.gguf, args.context, args.threads, mmap=False, repack=True, attention=args.attention)

    def logits(ids: Ids) -> Any:
        engine.clear()
        return engine.append([ids.tolist()], every=True)

    found = list(surprisals(logits, np.load(args.ids), args.context))
    np.savez(args.out, sums=[window.sum() for window in found], counts=[len(window) for window in found])


def quantise(args: argparse.Namespace) -> None:
    """GGUF to GGUF."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_{args.ftype}"), args.threads
    params.pure = args.pure
    if llama_cpp.llama_model_quantize(str(args.gguf).encode(), str(args.out).encode(), params):
        raise RuntimeError(f"llama.cpp could not quantise {args.gguf} to {args.ftype}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, run in (("quantise", quantise), ("surprisals", score)):
        add = commands.add_parser(name)
        add.set_defaults(run=run)
        add.add_argument("gguf", type=Path)
        add.add_argument("--out", type=Path, required=True)
        add.add_argument("--threads", type=int, required=True)
        if run is quantise:
            add.add_argument("--ftype", required=True, help="llama.cpp's name, as MOSTLY_Q4_0")
            add.add_argument("--pure", action="store_true", help="every matrix in that type")
        else:
            add.add_argument("--ids", type=Path, required=True)
            add.add_argument("--context", type=int, required=True)
            add.add_argument("--attention", choices=ATTENTION, default="default")
    return parser.parse_args()


@llama_cpp.llama_log_callback
def log(level: int, text: bytes, _data: object) -> None:
    """Warnings and errors alone."""
    if level in (_WARNING, _ERROR):
        print(text.decode(errors="replace"), end="", file=sys.stderr)


def main() -> None:
    args = parse()
    llama_cpp.llama_log_set(log, None)
    args.run(args)
    system = llama_cpp.llama_print_system_info().decode().strip()
    print(json.dumps({"out": str(args.out), "llama_cpp_python": llama_cpp.__version__, "system_info": system}))


if __name__ == "__main__":
    main()
