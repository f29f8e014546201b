"""tiermoe on the same tokens as the peers: decoding speed and perplexity. Every command prints one JSON object.

python -m benchmarks.ours decode MODEL --ids IDS.npy --prompt 32 --tokens 64 [--memory 700MiB --dense-bits 4]
python -m benchmarks.ours perplexity MODEL --bits 4
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import tiermoe
from benchmarks.block_device import device_bytes_read
from benchmarks.perplexity import perplexity as score

ROOT = Path(__file__).resolve().parents[1]


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("memory", "bits", "dense_bits", "quantizer", "cache", "threads", "lanes", "context", "preset")
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def decode(args: argparse.Namespace) -> dict[str, Any]:
    """Feeds the text's own tokens one at a time, as the peers do: the routing of real text, the same for all."""
    started = time.perf_counter()
    model, _ = tiermoe.load(args.model, **engine_options(args))
    load_s = time.perf_counter() - started
    import torch
    from transformers import DynamicCache

    ids = torch.from_numpy(np.load(args.ids))[None]
    engine = model.tiermoe
    cache = DynamicCache(config=model.config)
    times = []
    with torch.no_grad():
        if args.warm:  # a resident cache: every expert has been read before the clock starts
            model(ids, logits_to_keep=1)
        model(ids[:, : args.prompt], past_key_values=cache, logits_to_keep=1)
        before, device_before = engine.snapshot(), device_bytes_read(engine.store.root)
        for position in range(args.prompt, args.prompt + args.tokens):
            begin = time.perf_counter()
            model(ids[:, position : position + 1], past_key_values=cache)
            times.append(time.perf_counter() - begin)
    after, device_after = engine.snapshot(), device_bytes_read(engine.store.root)
    seconds = sum(times)
    hits, misses = after.hits - before.hits, after.misses - before.misses
    compute_s = seconds - (after.wait_s - before.wait_s)
    bound_s = max(compute_s, (after.bytes_read - before.bytes_read) / engine.bandwidth)
    stats = engine.stats()
    return {
        "decode_tok_s": args.tokens / seconds,
        "median_token_ms": median(times) * 1e3,
        "compute_ms": compute_s / args.tokens * 1e3,
        "wait_ms": (after.wait_s - before.wait_s) / args.tokens * 1e3,
        "bound_tok_s": args.tokens / bound_s,
        "hit_rate": hits / (hits + misses),
        "bytes_per_token": (after.bytes_read - before.bytes_read) / args.tokens,
        "device_bytes_per_token": (device_after - device_before) / args.tokens,
        "slots": stats["cache_slots"],
        "experts": stats["all_experts"],
        "link_bandwidth": engine.bandwidth,
        "lanes": stats["lanes"],
        "peak_memory_bytes": stats["peak_memory_bytes"],
        "load_s": load_s,
    }


def perplexity(args: argparse.Namespace) -> dict[str, Any]:
    """Scored as benchmarks.perplexity scores every engine: context 256, stride 128 unless told otherwise."""
    from benchmarks.reference import logits_of, token_ids

    model, _ = tiermoe.load(args.model, **engine_options(args))
    result = score(logits_of(model), token_ids(args.model, args.text), args.context, args.stride)
    return {
        "bits": args.bits,
        "quantizer": args.quantizer,
        "dense_bits": args.dense_bits,
        "perplexity": result.value,
        "tokens": result.tokens,
    }


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.ours", description=__doc__)
    top.formatter_class = argparse.RawDescriptionHelpFormatter
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("model", type=Path)
    common.add_argument("--memory")
    common.add_argument("--bits", type=int, default=4)
    common.add_argument("--dense-bits", type=int, default=16)
    common.add_argument("--quantizer", default="hqq")
    common.add_argument("--cache")
    common.add_argument("--threads", type=int, default=2)
    commands = top.add_subparsers(required=True)
    add = commands.add_parser("decode", parents=[common])
    add.add_argument("--ids", type=Path, required=True, help="token ids of a text (numpy file)")
    add.add_argument("--prompt", type=int, default=32)
    add.add_argument("--tokens", type=int, default=64)
    add.add_argument("--context", type=int, default=256)
    add.add_argument("--lanes", type=int)
    add.add_argument("--preset", default="default")
    add.add_argument("--warm", action="store_true", help="read all experts that the text needs beforehand")
    add.set_defaults(run=decode)
    add = commands.add_parser("perplexity", parents=[common])
    add.add_argument("--text", type=Path, default=ROOT / "data" / "heldout.txt")
    add.add_argument("--context", type=int, default=256)
    add.add_argument("--stride", type=int, default=128)
    add.set_defaults(run=perplexity)
    return top


def main() -> None:
    args = parser().parse_args()
    print(json.dumps(args.run(args)))


if __name__ == "__main__":
    main()
