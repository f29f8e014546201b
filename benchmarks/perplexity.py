"""Perplexity of a text, scored the same way whatever engine gives the logits. Prints one JSON object.

    python -m benchmarks.perplexity tiermoe MODEL --bits 4
    python -m benchmarks.perplexity transformers MODEL            # eager experts: the reference for every engine
    python -m benchmarks.perplexity llama.cpp MODEL --gguf FILE   # MODEL gives the tokenizer

The functions here need only numpy: `benchmarks.peer` calls them in an interpreter that has llama-cpp-python.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Logits = Callable[[Ids], npt.NDArray[np.float32]]
"""Token ids of a window (T,) → logits (T, vocabulary) after each of them."""
Surprisals = npt.NDArray[np.float64]

TEXT = Path(__file__).resolve().parents[1] / "data" / "heldout.txt"


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a text."""

    value: float  # exp(mean negative log-likelihood in nats)
    tokens: int  # that were scored
    context: int
    stride: int


def windows(length: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yields `(begin, end, first)`: the window `[begin, end)` scores the tokens `[first, end)`.

    Every token but the first is scored once, except that `stride == context` leaves the first token of each window
    unscored: nothing stands before it. A window that is not the first gives the tokens that it scores at least
    `context - stride` tokens of context.
    """
    if not 0 < stride <= context or context < 2:
        raise ValueError(f"need 0 < stride <= context and context >= 2, not stride {stride}, context {context}")
    scored = 1
    for begin in range(0, length, stride):
        end = min(begin + context, length)
        first = max(scored, begin + 1)
        if first < end:
            yield begin, end, first
        scored = end
        if end == length:
            return


def surprisals(logits_fn: Logits, ids: Ids, context: int, stride: int) -> Iterator[Surprisals]:
    """Negative log-likelihoods, float64 nats, of the tokens that each window of `ids` (N,) scores: of `context` tokens,
    one every `stride`. The log-likelihood is computed here, so that two engines differ by their logits alone."""
    for begin, end, first in windows(len(ids), context, stride):
        logits = logits_fn(ids[begin:end])[first - begin - 1 : end - begin - 1].astype(np.float64)
        target = ids[first:end]
        logits -= logits.max(axis=1, keepdims=True)
        normaliser = np.log(np.exp(logits).sum(axis=1))
        yield normaliser - logits[np.arange(len(target)), target]


def perplexity(logits_fn: Logits, ids: Ids, context: int, stride: int) -> Perplexity:
    """Perplexity of `ids` (N,) in windows of `context` tokens that start every `stride` tokens."""
    total, count = 0.0, 0
    for found in surprisals(logits_fn, ids, context, stride):
        total += float(found.sum())
        count += len(found)
    if not count:
        raise ValueError(f"{len(ids)} tokens leave nothing to score: at least 2 are needed")
    return Perplexity(float(np.exp(total / count)), count, context, stride)


def token_ids(model: Path, text: Path) -> Ids:
    """The tokens (N,) of a whole text file, without added special tokens."""
    from transformers import AutoTokenizer

    from tiermoe.lab.bench import cases

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    return np.asarray(cases.token_ids(tokenizer, text.read_text(encoding="utf-8")), dtype=np.int64)


def load_eager(model: Path, dtype: Any) -> Any:
    """The checkpoint with transformers' eager experts, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, experts_implementation="eager", trust_remote_code=False
    )
    loaded.eval()
    return loaded


def logits_of(model: Any) -> Logits:
    """The logits of a transformers model, or of what `tiermoe.load` returns."""
    import torch

    @torch.inference_mode()
    def logits(ids: Ids) -> npt.NDArray[np.float32]:
        out = model(torch.from_numpy(ids)[None].to(model.device), use_cache=False).logits[0]
        array: npt.NDArray[np.float32] = out.float().cpu().numpy()
        return array

    return logits


def of_tiermoe(args: argparse.Namespace) -> dict[str, Any]:
    import tiermoe

    names = ("memory", "bits", "dense_bits", "quantizer", "cache", "threads")
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    model, _ = tiermoe.load(args.model, **options)
    result = perplexity(logits_of(model), token_ids(args.model, args.text), args.context, args.stride)
    settings = model.tiermoe.settings
    return {"bits": args.bits, "quantizer": settings.quantizer_used, "dense_bits": settings.dense_bits_used,
            **asdict(result)}  # fmt: skip


def of_transformers(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.set_num_threads(args.threads)
    model = load_eager(args.model, getattr(torch, args.dtype))
    result = perplexity(logits_of(model), token_ids(args.model, args.text), args.context, args.stride)
    return {"dtype": args.dtype, **asdict(result)}


def of_llama(args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.llamacpp import Peer

    peer = Peer(args.peer_python, args.threads)
    ids = token_ids(args.model, args.text)
    sums, counts = peer.surprisals(args.gguf, ids, args.context, args.stride, args.attention)
    result = Perplexity(float(np.exp(sums.sum() / counts.sum())), int(counts.sum()), args.context, args.stride)
    return {"gguf": args.gguf.name, "bytes": args.gguf.stat().st_size, "attention": args.attention, **asdict(result)}


def main() -> None:
    top = argparse.ArgumentParser(prog="python -m benchmarks.perplexity", description=__doc__)
    top.formatter_class = argparse.RawDescriptionHelpFormatter
    engines = top.add_subparsers(required=True, dest="engine")

    def engine(name: str, run: Callable[[argparse.Namespace], dict[str, Any]]) -> argparse.ArgumentParser:
        added = engines.add_parser(name)
        added.set_defaults(run=run)
        added.add_argument("model", type=Path)
        added.add_argument("--text", type=Path, default=TEXT)
        added.add_argument("--context", type=int, default=256, help="tokens of a window")
        added.add_argument("--stride", type=int, default=128, help="tokens from a window's beginning to the next's")
        added.add_argument("--threads", type=int, default=2)
        return added

    ours = engine("tiermoe", of_tiermoe)
    ours.add_argument("--memory")
    ours.add_argument("--bits", type=int, default=4)
    ours.add_argument("--dense-bits", type=int, help="default: as --bits, 4 for 2")
    ours.add_argument("--quantizer")
    ours.add_argument("--cache")
    reference = engine("transformers", of_transformers)
    reference.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    peer = engine("llama.cpp", of_llama)
    peer.add_argument("--gguf", type=Path, required=True)
    peer.add_argument("--attention", choices=["default", "exact"], default="default",
                      help="llama.cpp's default (float16 KV cache, flash attention) or float32")  # fmt: skip
    peer.add_argument("--peer-python", default=sys.executable, help="interpreter that has llama-cpp-python")
    args = top.parse_args()
    print(json.dumps({"engine": args.engine, **args.run(args)}))


if __name__ == "__main__":
    main()
