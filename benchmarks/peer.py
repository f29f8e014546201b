"""What runs in the interpreter that holds llama-cpp-python and gguf: each command prints one JSON object.

`benchmarks.llamacpp` starts it as a subprocess, so that the project's environment needs no peer and
llama.cpp's memory is a process of its own. Token ids come in as .npy files, logits go out as .npy files.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from benchmarks.perplexity import Logits, perplexity, surprisals
from tiermoe.bench.llama.gguf_file import FILE_TYPES, QUANTISED, convert_to
from tiermoe.bench.llama.measure import ATTENTION, LlamaEngine

KINDS = [*FILE_TYPES, *QUANTISED]
_WARNING, _ERROR = 3, 4  # ggml_log_level


def convert(args: argparse.Namespace) -> dict[str, Any]:
    """Checkpoint to GGUF."""
    convert_to(args.model, args.out, args.type, args.threads)
    return {"out": str(args.out), "bytes": args.out.stat().st_size}


def load(args: argparse.Namespace, context: int) -> LlamaEngine:
    return LlamaEngine(args.gguf, context, args.threads, mmap=False, repack=True, attention=args.attention)


def window_logits(args: argparse.Namespace, context: int) -> Logits:
    """A ``logits_fn`` for `benchmarks.perplexity`: every window starts with an empty KV cache."""
    engine = load(args, context)

    def logits(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        engine.clear()
        return engine.logits(ids.tolist(), every=True)

    return logits


def logits(args: argparse.Namespace) -> dict[str, Any]:
    ids = np.load(args.ids)
    np.save(args.out, window_logits(args, len(ids))(ids))
    return {"tokens": len(ids)}


def score(args: argparse.Namespace) -> dict[str, Any]:
    logits_fn = window_logits(args, args.context)
    return asdict(perplexity(logits_fn, np.load(args.ids), args.context, args.stride))


def surprise(args: argparse.Namespace) -> dict[str, Any]:
    """The mean of each window, saved."""
    found = surprisals(window_logits(args, args.context), np.load(args.ids), args.context, args.stride)
    np.save(args.out, [window.mean() for window in found])
    return {"out": str(args.out)}


def quantise(args: argparse.Namespace) -> dict[str, Any]:
    """GGUF to GGUF: every matrix in the same type, as far as llama.cpp has it so."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.pure = getattr(llama_cpp, args.ftype), args.threads, True
    if llama_cpp.llama_model_quantize(str(args.gguf).encode(), str(args.out).encode(), params):
        raise RuntimeError(f"llama.cpp could not quantise {args.gguf}")
    return {"out": str(args.out), "bytes": args.out.stat().st_size}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer", description=__doc__)
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Callable[[argparse.Namespace], dict[str, Any]]) -> argparse.ArgumentParser:
        added = commands.add_parser(name)
        added.set_defaults(run=run)
        added.add_argument("--threads", type=int, required=True)
        return added

    add = command("convert", convert)
    add.add_argument("model", type=Path)
    add.add_argument("--type", choices=KINDS, required=True)
    add.add_argument("--out", type=Path, required=True)
    add = command("quantise", quantise)
    add.add_argument("gguf", type=Path)
    add.add_argument("--ftype", required=True, help="name of llama.cpp's, as LLAMA_FTYPE_MOSTLY_Q4_0")
    add.add_argument("--out", type=Path, required=True)
    for name, run in (("logits", logits), ("perplexity", score), ("surprisals", surprise)):
        add = command(name, run)
        add.add_argument("gguf", type=Path)
        add.add_argument("--ids", type=Path, required=True)
        add.add_argument("--attention", choices=ATTENTION, default="default")
        if name != "perplexity":
            add.add_argument("--out", type=Path, required=True)
        if name != "logits":
            add.add_argument("--context", type=int, required=True)
            add.add_argument("--stride", type=int, required=True)
    return parser.parse_args()


@llama_cpp.llama_log_callback
def log(level: int, text: bytes, _data: object) -> None:
    """Warnings and errors alone."""
    if level in (_WARNING, _ERROR):
        print(text.decode(errors="replace"), end="", file=sys.stderr)


def main() -> None:
    args = parse()
    llama_cpp.llama_log_set(log, None)
    result: dict[str, Any] = args.run(args)
    system = llama_cpp.llama_print_system_info().decode().strip()
    print(json.dumps({**result, "llama_cpp_python": llama_cpp.__version__, "system_info": system}))


if __name__ == "__main__":
    main()
