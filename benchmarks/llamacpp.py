"""llama.cpp on the same model, text and scoring, for comparison.

    python -m benchmarks.llamacpp convert MODEL --type q4_k_m --out FILE.gguf
    python -m benchmarks.llamacpp logits MODEL FILE.gguf        # the difference to transformers' logits
    python -m benchmarks.llamacpp perplexity MODEL FILE.gguf

MODEL is the directory of a Qwen3-MoE, gpt-oss, DeepSeek-V2 or GLM4-MoE checkpoint (it also gives the tokenizer).
llama.cpp runs in the interpreter that --peer-python names, which needs llama-cpp-python, gguf and numpy; every command
prints one JSON object. `tiermoe bench` measures its speed.

llama.cpp rounds the bounds between which YaRN blends its frequencies; gpt-oss is published with bounds that are not
rounded, so its logits differ by that from transformers'.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tiermoe.bench.child import last_object

ROOT = Path(__file__).resolve().parents[1]


class PeerFailed(Exception):
    """The peer's interpreter ended with an error, which it has printed."""


def peer_command(args: argparse.Namespace, *words: object) -> list[str]:
    start = ["env", f"PYTHONPATH={ROOT}:{ROOT / 'src'}", args.peer_python, "-m", "benchmarks.peer"]
    return [*start, *map(str, words), "--threads", str(args.threads)]


def run_peer(args: argparse.Namespace, *words: object) -> dict[str, Any]:
    """Run one command of `benchmarks.peer` and return the JSON object that it printed."""
    done = subprocess.run(peer_command(args, *words), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise PeerFailed(f"{args.peer_python} ended with code {done.returncode}")
    return last_object(done.stdout)


def save_ids(args: argparse.Namespace, directory: str, limit: int | None = None) -> Path:
    from benchmarks.reference import token_ids

    path = Path(directory) / "ids.npy"
    np.save(path, token_ids(args.model, args.text)[args.offset :][:limit])
    return path


def convert(args: argparse.Namespace) -> dict[str, Any]:
    return run_peer(args, "convert", args.model.resolve(), "--type", args.type, "--out", args.out.resolve())


def logits(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the logits of one window of text with those of transformers' eager experts in float32."""
    import torch

    from benchmarks.reference import load_eager, logits_of

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as directory:
        ids = save_ids(args, directory, args.tokens)
        out = Path(directory) / "logits.npy"
        run_peer(args, "logits", args.gguf.resolve(), "--ids", ids, "--out", out, "--attention", args.attention)
        theirs = np.load(out)
        ours = logits_of(load_eager(args.model, torch.float32))(np.load(ids))
    return {
        "gguf": args.gguf.name,
        "attention": args.attention,
        "tokens": len(ours),
        "max_abs_difference": float(np.abs(ours - theirs).max()),
        "mean_abs_difference": float(np.abs(ours - theirs).mean()),
        "max_abs_logit": float(np.abs(ours).max()),
        "same_argmax": float((ours.argmax(1) == theirs.argmax(1)).mean()),
    }


def perplexity(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        words = ["perplexity", args.gguf.resolve(), "--ids", save_ids(args, directory)]
        result = run_peer(
            args, *words, "--context", args.context, "--stride", args.stride, "--attention", args.attention
        )
    return {"gguf": args.gguf.name, "bytes": args.gguf.stat().st_size, "attention": args.attention, **result}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.llamacpp", description=__doc__)
    top.formatter_class = argparse.RawDescriptionHelpFormatter
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("model", type=Path)
    common.add_argument("--peer-python", default=sys.executable, help="interpreter that has llama-cpp-python")
    common.add_argument("--threads", type=int, default=2)
    text = argparse.ArgumentParser(add_help=False)
    text.add_argument("gguf", type=Path)
    text.add_argument("--text", type=Path, default=ROOT / "data" / "heldout.txt")
    text.add_argument("--offset", type=int, default=0, help="tokens of the text to leave out at its beginning")
    text.add_argument(
        "--attention",
        choices=["default", "exact"],
        default="default",
        help="llama.cpp's default (float16 KV cache, flash attention) or float32",
    )
    commands = top.add_subparsers(required=True)
    add = commands.add_parser("convert", parents=[common])
    add.add_argument("--type", choices=["f32", "bf16", "q4_0", "q4_k_m", "mxfp4"], required=True)
    add.add_argument("--out", type=Path, required=True)
    add.set_defaults(run=convert)
    add = commands.add_parser("logits", parents=[common, text])
    add.add_argument("--tokens", type=int, default=256)
    add.set_defaults(run=logits, attention="exact")
    add = commands.add_parser("perplexity", parents=[common, text])
    add.add_argument("--context", type=int, default=256)
    add.add_argument("--stride", type=int, default=128)
    add.set_defaults(run=perplexity)
    return top


def main() -> None:
    args = parser().parse_args()
    try:
        print(json.dumps(args.run(args)))
    except PeerFailed as error:
        sys.exit(f"llamacpp: {error}")


if __name__ == "__main__":
    main()
