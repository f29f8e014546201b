"""A packed 4-bit matrix times M tokens: our own kernel, torch's operator, and decoding before an ordinary product."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernels.weights import Fields, Turns, copy, nbytes, packed, random
from benchmarks.rounds import rates, ratios, timed
from tiermoe.kernels.native.linear import linear
from tiermoe.kernels.native.matrix import matrix_form
from tiermoe.quant.int4 import Int4
from tiermoe.quant.int4_layout import is_torchs
from tiermoe.quant.scratch import scratch

NATIVE, TORCH, DECODED = "native", "torch int4", "decode + linear"

Product = Callable[[torch.Tensor, Fields], torch.Tensor]


def products(encoding: Int4, out: int, in_: int) -> dict[str, Product]:
    """The ways to multiply that this machine has."""
    group = encoding.group

    def decoded(x: torch.Tensor, fields: Fields) -> torch.Tensor:
        into = scratch.take("weight", (out * in_,), torch.bfloat16)
        return F.linear(x, encoding.decode(fields, out, in_, torch.bfloat16, into=into))

    def torchs(x: torch.Tensor, fields: Fields) -> torch.Tensor:
        return torch._weight_int4pack_mm_for_cpu(x, fields["codes"], group, fields["scales_and_zeros"])

    found: dict[str, Product] = {TORCH: torchs, DECODED: decoded} if is_torchs() else {DECODED: decoded}
    form = matrix_form(encoding, out, in_, torch.bfloat16)
    return {NATIVE: lambda x, fields: linear(x, form, fields), **found} if form else found


def measure(tokens: Sequence[int], out: int, in_: int, memory: int, gflop: float, rounds: int) -> dict[str, Any]:
    """One row for each M of `tokens`: GB/s of packed bytes, GFLOP/s, and how many times as fast the first way is as the
    others. memory: bytes of the matrices that are taken in turn; gflop: about what one timed call computes at most."""
    encoding, first = packed(out, in_)
    each = nbytes(first)
    matrices = [first, *(copy(first) for _ in range(memory // each))]
    ways = products(encoding, out, in_)
    rows = []
    for count in tokens:
        x, flop = random(count, in_, 1), 2 * count * out * in_
        calls = min(max(int(gflop * 1e9 / flop), 2), len(matrices))
        seconds = timed(_over(ways, x, Turns(matrices), calls), rounds)
        rows.append({
            "tokens": count,
            "products_a_call": calls,
            "ways": {
                name: {"gb_s": rates(took, calls * each / 1e9), "gflop_s": rates(took, calls * flop / 1e9)}
                for name, took in seconds.items()
            },
            "ratios": {next(iter(ways)): ratios(seconds, next(iter(ways)))},
        })  # fmt: skip
    weights = {"matrices": len(matrices), "packed_bytes": each, "all_bytes": each * len(matrices)}
    return {"out": out, "in": in_, "group": encoding.group, **weights, "rows": rows}


def _over(ways: dict[str, Product], x: torch.Tensor, turns: Turns, calls: int) -> dict[str, Callable[[], None]]:
    def run(way: Product) -> Callable[[], None]:
        def over() -> None:
            for fields in turns.take(calls):
                way(x, fields)

        return over

    return {name: run(way) for name, way in ways.items()}
