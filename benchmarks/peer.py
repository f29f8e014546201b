"""What runs in the interpreter that holds llama-cpp-python and gguf: each command prints one JSON object.

`benchmarks.llamacpp` starts it as a subprocess, so that the project's environment needs no peer and
llama.cpp's memory is a process of its own. Token ids come in as .npy files, logits go out as .npy files.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from benchmarks.gguf_file import FILE_TYPES, write_gguf
from benchmarks.llama_engine import ATTENTION, Engine
from benchmarks.perplexity import Logits, perplexity

QUANTISED = {"q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}


def convert(args: argparse.Namespace) -> dict[str, Any]:
    """Checkpoint to GGUF; the quantised types go through a bf16 file, removed afterwards."""
    if args.type in FILE_TYPES:
        write_gguf(args.model, args.out, args.type)
        return {"out": str(args.out), "bytes": args.out.stat().st_size}
    whole = args.out.with_suffix(".bf16.gguf")
    try:
        write_gguf(args.model, whole, "bf16")
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = QUANTISED[args.type], args.threads
        if llama_cpp.llama_model_quantize(str(whole).encode(), str(args.out).encode(), params):
            raise RuntimeError(f"llama.cpp could not quantise {whole} to {args.type}")
    finally:
        whole.unlink(missing_ok=True)
    return {"out": str(args.out), "bytes": args.out.stat().st_size}


def load(args: argparse.Namespace, context: int) -> Engine:
    mmap, repack = not args.no_mmap, not args.no_repack
    return Engine(args.gguf, context, args.threads, mmap=mmap, repack=repack, attention=args.attention)


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


def decode(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate a prompt, then decode token by token; ``decode_s`` covers the decoded tokens alone."""
    ids = np.load(args.ids)
    prompt, follow = ids[: args.prompt].tolist(), ids[args.prompt :].tolist()
    began = time.perf_counter()
    engine = load(args, args.prompt + args.tokens)
    loaded = time.perf_counter()
    token = int(engine.logits(prompt, every=False).argmax())
    prefilled = time.perf_counter()
    decoded = []
    for step in range(args.tokens):
        token = token if args.feed == "greedy" else follow[step]
        decoded.append(token)
        token = int(engine.logits([token], every=False).argmax())
    seconds = time.perf_counter() - prefilled
    return {
        "threads": args.threads,
        "feed": args.feed,
        "mmap": not args.no_mmap,
        "repack": not args.no_repack,
        "load_s": loaded - began,
        "prefill_s": prefilled - loaded,
        "decode_s": seconds,
        "decode_tok_s": args.tokens / seconds,
        "prompt_tokens": len(prompt),
        "completion_tokens": args.tokens,
        "token_ids": decoded,
    }


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
    add.add_argument("--type", choices=[*FILE_TYPES, *QUANTISED], required=True)
    add.add_argument("--out", type=Path, required=True)
    for name, run in (("logits", logits), ("perplexity", score), ("decode", decode)):
        add = command(name, run)
        add.add_argument("gguf", type=Path)
        add.add_argument("--ids", type=Path, required=True)
        add.add_argument("--no-mmap", action="store_true")
        add.add_argument("--no-repack", action="store_true")
        add.add_argument("--attention", choices=ATTENTION, default="default")
        if name == "logits":
            add.add_argument("--out", type=Path, required=True)
        elif name == "perplexity":
            add.add_argument("--context", type=int, required=True)
            add.add_argument("--stride", type=int, required=True)
        else:
            add.add_argument("--prompt", type=int, required=True)
            add.add_argument("--tokens", type=int, required=True)
            add.add_argument("--feed", choices=["text", "greedy"], required=True)
    return parser.parse_args()


def main() -> None:
    args = parse()
    result: dict[str, Any] = args.run(args)
    system = llama_cpp.llama_print_system_info().decode().strip()
    print(json.dumps({**result, "llama_cpp_python": llama_cpp.__version__, "system_info": system}))


if __name__ == "__main__":
    main()
