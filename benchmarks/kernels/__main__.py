"""The hot paths of computing on packed weights, each beside what it replaces, in one run.

    python -m benchmarks.kernels [--tokens 1,2,4,6,16,64,512] [--only product,experts,attention,router]

Weights are taken in turn from more memory than the last cache holds (--megabytes), so a kernel that is limited by
memory shows at most its bandwidth (`memory_bandwidth`, measured in the same run). Ways alternate, every other round
backwards; ratios are taken within a round: above 1 the first way is faster. Prints one JSON object, and a table on
standard error.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.kernels import attention, experts, product
from benchmarks.kernels.weights import enough_bytes
from benchmarks.rounds import about, at_least_one, numbers, parser_of, print_table, shown
from tiermoe import native
from tiermoe.process import bandwidth
from tiermoe.process.machine import processors

PARTS = ("product", "experts", "attention", "router")


def measure(args: Any) -> dict[str, Any]:
    """The document that is printed."""
    torch.set_num_threads(args.threads)
    memory = args.megabytes << 20
    runs: Mapping[str, Callable[[], dict[str, Any]]] = {
        "product": lambda: product.measure(args.tokens, args.out, args.hidden, memory, args.gflop, args.rounds),
        "experts": lambda: experts.measure(args.hidden, args.inner, args.top_k, memory, args.rounds),
        "attention": lambda: attention.attention(
            args.hidden, args.heads, args.kv_heads, args.head_dim, args.past, memory, args.rounds
        ),
        "router": lambda: attention.router(args.hidden, args.experts, args.top_k, args.rounds),
    }
    document = {**about(args.rounds, args.threads), "native": native.available()}
    document["memory_bandwidth"] = bandwidth.measure(args.threads)["bandwidth"]
    return {**document, **{name: runs[name]() for name in PARTS if name in args.only}}


def tables(document: dict[str, Any]) -> None:
    """What people read."""
    rows = []
    for part in PARTS:
        found = document.get(part, {})
        if "skipped" in found:
            rows.append([part, found["skipped"], "", "", ""])
        for row in found.get("rows", [found] if "ways" in found else []):
            rows += _rows(f"{part}, M = {row['tokens']}" if "tokens" in row else part, row)
    print_table(["", "way", "GB/s or us", "GFLOP/s", "first way's speed over it"], rows)


def _rows(name: str, row: dict[str, Any]) -> list[list[str]]:
    (over,) = row["ratios"].values()
    return [
        [name, way, shown(found.get("gb_s", found.get("us"))), shown(found.get("gflop_s")), shown(over.get(way))]
        for way, found in row["ways"].items()
    ]


def parts_asked(text: str) -> list[str]:
    """Of PARTS. ValueError for an unknown one."""
    words = text.split(",")
    if set(words) - set(PARTS):
        raise ValueError(f"{text}: there are {', '.join(PARTS)}")
    return words


def main() -> None:
    parser = parser_of("benchmarks.kernels", __doc__)
    parser.add_argument("--only", type=parts_asked, default=list(PARTS), help="default all: " + ",".join(PARTS))
    parser.add_argument("--tokens", type=numbers, default=[1, 2, 4, 6, 16, 64, 512], help="M of the products")
    parser.add_argument("--threads", type=at_least_one, default=processors(), help="default one a core")
    parser.add_argument(
        "--megabytes", type=at_least_one, default=enough_bytes() >> 20, help="MiB of weights; default 4 last caches"
    )
    parser.add_argument("--gflop", type=float, default=2.0, help="what a timed call computes, about (default 2)")
    sizes = {"out": 2048, "hidden": 2048, "inner": 1024, "experts": 128, "top-k": 8, "heads": 32, "kv-heads": 4,
             "head-dim": 64, "past": 128}  # fmt: skip
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=at_least_one, default=default, help=f"default {default}")
    args = parser.parse_args()
    try:
        document = measure(args)
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(document))
    tables(document)


if __name__ == "__main__":
    main()
