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
from benchmarks.perplexity import perplexity

KV_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "f32": llama_cpp.GGML_TYPE_F32}
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


def load(args: argparse.Namespace, context: int, logits_all: bool) -> llama_cpp.Llama:
    """The model with llama.cpp's defaults (KV cache in float16 unless --kv says otherwise)."""
    kv = KV_TYPES[args.kv]
    return llama_cpp.Llama(
        str(args.gguf),
        n_ctx=context,
        n_batch=min(context, 512),
        n_ubatch=min(context, 512),
        n_threads=args.threads,
        n_threads_batch=args.threads,
        logits_all=logits_all,
        use_mmap=not args.no_mmap,
        type_k=kv,
        type_v=kv,
        verbose=False,
    )


def window_logits(args: argparse.Namespace, context: int) -> Callable[..., npt.NDArray[np.float32]]:
    """A ``logits_fn`` for `benchmarks.perplexity`: every window starts with an empty KV cache."""
    llama = load(args, context, logits_all=True)

    def logits(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        llama.reset()
        llama.eval(ids.tolist())
        scores: npt.NDArray[np.float32] = llama.scores[: len(ids)].copy()
        return scores

    return logits


def logits(args: argparse.Namespace) -> dict[str, Any]:
    ids = np.load(args.ids)
    np.save(args.out, window_logits(args, len(ids))(ids))
    return {"tokens": len(ids)}


def score(args: argparse.Namespace) -> dict[str, Any]:
    logits_fn = window_logits(args, args.context)
    return asdict(perplexity(logits_fn, np.load(args.ids), args.context, args.stride))


def last_logits(llama: llama_cpp.Llama) -> npt.NDArray[np.float32]:
    pointer = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
    return np.ctypeslib.as_array(pointer, shape=(llama.n_vocab(),))


def decode(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate a prompt, then decode token by token; ``decode_s`` covers the decoded tokens alone."""
    ids = np.load(args.ids)
    prompt, follow = ids[: args.prompt].tolist(), ids[args.prompt :].tolist()
    began = time.perf_counter()
    llama = load(args, args.prompt + args.tokens + 1, logits_all=False)
    loaded = time.perf_counter()
    llama.eval(prompt)
    token = int(last_logits(llama).argmax())
    prefilled = time.perf_counter()
    decoded = []
    for step in range(args.tokens):
        token = token if args.feed == "greedy" else follow[step]
        decoded.append(token)
        llama.eval([token])
        token = int(last_logits(llama).argmax())
    seconds = time.perf_counter() - prefilled
    return {
        "threads": args.threads,
        "feed": args.feed,
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
        add.add_argument("--kv", choices=KV_TYPES, default="f16")
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
