"""Attention over long sequences: one token's at GB/s of keys and values, beside a plain read of memory; that of a chunk
of a prompt at GFLOP/s, beside torch's scaled_dot_product_attention; and that of a turn's few tokens, as given and as
verified ones.

    python -m benchmarks.attention [--depths 2048,8192,32768] [--shapes qwen3-30b-a3b] [--threads 1,2]
                                   [--isa avx512bf16,avx2] [--kv-bits 16,8,4] [--turns 24]

One layer, random keys and values, taken in turn from more memory than the last cache holds (--megabytes). The layer's
projections are of 64 hidden columns, so that nothing but attention counts. Ways take turns; `share` is a rate over that
of the read of the same round. Prints one JSON object, and a table on standard error.
"""

import json
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels import READ, SHAPES, Shape, Turns, enough_bytes, random, settled, under
from benchmarks.rounds import about, at_least_one, numbers, parser_of, print_table, rates, shown, timed
from tiermoe import native
from tiermoe.config import KV_BITS
from tiermoe.formats.plain import Plain
from tiermoe.kernels.attention import (
    DecodeAttention,
    GroupedAttention,
    PackedMatrix,
    Slabs,
    Step,
    decode_attention,
    prompt_attention,
)
from tiermoe.kernels.norm import Norm
from tiermoe.lab.bench.summary import spread
from tiermoe.model.attention.base import attend
from tiermoe.model.cache.memory import CODED
from tiermoe.platform.machine import processors
from tiermoe.types import FEW_TOKENS

HIDDEN = 64
CHUNK = 512
TORCH = "torch"


def slabs_of(shape: Shape, depth: int, bits: int, memory: int) -> list[Slabs]:
    """Caches of one sequence with room for `depth` positions and a chunk, of so many bytes together."""
    rows, scale = (1, shape.kv_heads, depth + CHUNK), torch.full((1,), 0.01).bfloat16()
    each = 2 * shape.kv_heads * (depth + CHUNK) * shape.head * bits // 8
    made = []
    for _ in range(max(memory // each, 1)):
        if bits == 16:
            made.append(Slabs(*(torch.empty(*rows, shape.head).bfloat16().normal_() for _ in range(2))))
        else:
            low, high, columns = (-127, 128, shape.head) if bits == 8 else (0, 256, shape.head // 2)
            codes = [torch.randint(low, high, (*rows, columns), dtype=CODED[bits]) for _ in range(2)]
            scales = scale.expand(*rows, 1).contiguous()
            made.append(Slabs(*codes, scales=(scales, scales)))
    return made


def layer_of(shape: Shape) -> DecodeAttention:
    """ValueError where the native kernels do not take the shape."""

    def matrix(out: int, in_: int) -> PackedMatrix:
        return PackedMatrix(Plain(), {"weight": random(out, in_)}, out, in_)

    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    norm = Norm(torch.ones(HIDDEN).bfloat16(), 1e-6)
    kernel = decode_attention(
        GroupedAttention(
            matrix(queries, HIDDEN), matrix(keys, HIDDEN), matrix(keys, HIDDEN), matrix(HIDDEN, queries), norm, norm,
            shape.head, shape.head, shape.head**-0.5,
        )
    )  # fmt: skip
    if kernel is None:
        raise ValueError("the native kernels take no attention of this shape here")
    return kernel


def few_tokens(
    shape: Shape, depth: int, slabs: list[Slabs], tokens: int = 1, given: bool = False
) -> Callable[[], None]:
    """So many tokens attend from position `depth` on, over each of the caches. given: a prompt's."""
    layer, x, turned = layer_of(shape), random(tokens, HIDDEN), random(tokens, shape.head)
    whose = torch.full((tokens,), given)
    step = Step(
        torch.zeros(tokens, dtype=torch.int64), torch.arange(depth, depth + tokens), turned, turned, given=whose
    )

    def run() -> None:
        for each in slabs:
            layer(x, step, each)

    return run


def chunk(shape: Shape, depth: int, slabs: list[Slabs]) -> Callable[[], None]:
    """A chunk's attention from position `depth` on, over the next of the caches."""
    query, turns = torch.randn(CHUNK, shape.heads, shape.head).bfloat16(), Turns(slabs)

    def run() -> None:
        for each in turns.take(1):
            prompt_attention(query, each, 0, depth, shape.head**-0.5)

    return run


def chunk_by_torch(shape: Shape, depth: int, slabs: list[Slabs]) -> Callable[[], None]:
    """The same by torch's operator."""
    query, each = torch.randn(CHUNK, shape.heads, shape.head).bfloat16(), slabs[0]
    assert each.values is not None
    keys, values = each.keys[0], each.values[0]

    def run() -> None:
        attend(query, keys, values, shape.head**-0.5, None, None)

    return run


def measure(
    shape: Shape, depth: int, threads: int, isas: list[str], bits: list[int], turns: list[int], memory: int, rounds: int
) -> list[dict[str, Any]]:
    """A row for each way."""
    torch.set_num_threads(threads)
    buffer = torch.ones(memory // 8, dtype=torch.int64)
    runs: dict[str, Callable[[], None]] = {}
    nbytes: dict[str, int] = {}
    tokens: dict[str, int] = {}

    def flop(count: int) -> float:
        return 4e-9 * shape.heads * shape.head * count * (depth + (count + 1) / 2)

    for kept in bits:
        slabs = slabs_of(shape, depth, kept, memory)
        each = 2 * shape.kv_heads * (depth + 1) * (shape.head * kept // 8 + (0 if kept == 16 else 2))
        for isa in isas:
            name = f"one token, {kept} bits, {isa}"
            runs[name], nbytes[name] = under(isa, few_tokens(shape, depth, slabs)), each * len(slabs)
            runs[f"a chunk, {kept} bits, {isa}"] = under(isa, chunk(shape, depth, slabs))
            for count in turns:
                for given in (True, False):
                    name = f"{count} {'given' if given else 'verified'} tokens, {kept} bits, {isa}"
                    runs[name], tokens[name] = under(isa, few_tokens(shape, depth, slabs[:1], count, given)), count
        if kept == 16:
            runs[f"a chunk, {TORCH}"] = chunk_by_torch(shape, depth, slabs)
    seconds = timed({READ: lambda: buffer.sum(), **runs}, rounds, before=settled)
    rows: list[dict[str, Any]] = [{"way": READ, "gb_s": rates(seconds[READ], buffer.nbytes / 1e9)}]
    for name in runs:
        took = seconds[name]
        if name in nbytes:
            whole = nbytes[name] / buffer.nbytes
            share = spread([whole * plain / own for own, plain in zip(took, seconds[READ], strict=True)])
            rows.append({"way": name, "gb_s": rates(took, nbytes[name] / 1e9), "share": share})
        else:
            rows.append({"way": name, "gflop_s": rates(took, flop(tokens.get(name, CHUNK)))})
    return [{"depth": depth, "threads": threads, **row} for row in rows]


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--depths", type=numbers, default=[2048, 8192, 32768], help="default 2048,8192,32768")
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=["qwen3-30b-a3b"],
                        help=f"of {', '.join(SHAPES)}; default qwen3-30b-a3b")  # fmt: skip
    parser.add_argument("--threads", type=numbers, default=[processors()], help="default one a core")
    parser.add_argument("--kv-bits", type=numbers, default=[16, 8, 4], help="default 16,8,4")
    parser.add_argument("--turns", type=numbers, default=[24], help="tokens of a turn; default 24")
    parser.add_argument("--isa", type=lambda text: text.split(","), default=native.instruction_sets()[:1],
                        help=f"default the fastest of {', '.join(native.instruction_sets())}")  # fmt: skip
    parser.add_argument("--megabytes", type=at_least_one, default=enough_bytes() >> 20,
                        help="MiB of keys and values; default 4 last caches")  # fmt: skip
    args = parser.parse_args()
    for what, given, known in (
        ("there are", args.shapes, list(SHAPES)),
        ("this machine has", args.isa, native.instruction_sets()),
        ("keys and values have", args.kv_bits, list(KV_BITS)),
    ):
        if set(given) - set(known):
            parser.error(f"{what} {', '.join(map(str, known))}, not {', '.join(map(str, given))}")
    if max(args.turns) > (most := min(CHUNK, FEW_TOKENS)):
        parser.error(f"a turn has at most {most} tokens here, not {max(args.turns)}")
    document, table = about(args.rounds), []
    for name in args.shapes:
        document[name] = []
        for depth in args.depths:
            for threads in args.threads:
                found = measure(
                    SHAPES[name], depth, threads, args.isa, args.kv_bits, args.turns, args.megabytes << 20, args.rounds
                )
                document[name] += found
                for row in found:
                    rate = row.get("gb_s") or row.get("gflop_s")
                    table.append(
                        [f"{name}, {depth:,}, {row['way']}", str(threads), shown(rate), shown(row.get("share"))]
                    )
    print(json.dumps(document))
    print_table(["", "threads", "GB/s or GFLOP/s", "share of the read"], table)


if __name__ == "__main__":
    main()
