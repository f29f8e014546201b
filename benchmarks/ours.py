"""tiermoe's perplexity, scored as every other engine's. Prints one JSON object. `tiermoe bench` measures its speed.

python -m benchmarks.ours perplexity MODEL --bits 4
"""

import argparse
import json
from pathlib import Path
from typing import Any

import tiermoe
from benchmarks.perplexity import perplexity as score

ROOT = Path(__file__).resolve().parents[1]


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("memory", "bits", "dense_bits", "quantizer", "cache", "threads")
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def perplexity(args: argparse.Namespace) -> dict[str, Any]:
    """Scored as benchmarks.perplexity scores every engine: context 256, stride 128 unless told otherwise."""
    from benchmarks.reference import logits_of, token_ids

    model, _ = tiermoe.load(args.model, **engine_options(args))
    result = score(logits_of(model), token_ids(args.model, args.text), args.context, args.stride)
    return {
        "bits": args.bits,
        "quantizer": model.tiermoe.settings.quantizer_used,
        "dense_bits": model.tiermoe.stats()["dense_bits"],
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
    common.add_argument("--dense-bits", type=int, help="default: as --bits, 4 for 2")
    common.add_argument("--quantizer")
    common.add_argument("--cache")
    common.add_argument("--threads", type=int, default=2)
    commands = top.add_subparsers(required=True)
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
