"""One token through the large parts of models of known shapes: GB/s of weights, beside a plain read of memory.

    python -m benchmarks.kernels [--shapes qwen3-30b-a3b,gpt-oss-20b] [--threads 1,2] [--dense-bits 4]
                                 [--isa avx512bf16,avx2] [--types q2_k,iq2_xxs]

With --types, in the place of a shape's parts its gate and up in these types: of blocks of GGUF files, or encodings as
stores name them (int4/cpu-avx512/g64).

Weights are random bytes, taken in turn from more memory than the last cache holds (--megabytes). The plain read takes
turns with the parts, so that `share`, a part's rate over that of the read of the same round, holds on a busy machine
too, and so do instruction sets that are compared (--isa). Prints one JSON object, and a table on standard error.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.rounds import about, at_least_one, numbers, parser_of, print_table, rates, shown, timed
from tiermoe import native
from tiermoe.formats.encoding import Encoding
from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.formats.gguf_types import gguf_encoding
from tiermoe.formats.registry import encoding_for, encoding_named
from tiermoe.kernels.experts import ExpertKernel, SlotViews, expert_kernel
from tiermoe.kernels.gates import gate_named
from tiermoe.kernels.linear import linear, matrix_form
from tiermoe.lab.bench.summary import spread
from tiermoe.platform.bandwidth import last_cache_bytes
from tiermoe.platform.machine import processors
from tiermoe.types import MoeLayer, Part

READ = "plain read"
Fields = dict[str, torch.Tensor]

_CACHES, _LEAST, _MOST = 4, 64 << 20, 1 << 30


@dataclass(frozen=True)
class Shape:
    """Sizes of what one token reads."""

    hidden: int
    inner: int
    top_k: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    clamped: bool = False  # gpt-oss's experts, with biases


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 8, 32, 4, 128, 151936),
    "gpt-oss-20b": Shape(2880, 2880, 4, 64, 8, 64, 201088, clamped=True),
    "mixtral-8x7b": Shape(4096, 14336, 2, 32, 8, 128, 32000),
    "stories-7m-widened": Shape(2048, 1024, 4, 64, 32, 32, 4096),
}


@dataclass(frozen=True)
class Measured:
    """A part of a model."""

    run: Callable[[], None]  # computes all its turns once
    bytes: int  # that the turns read


def enough_bytes() -> int:
    """Four times the last cache, 64 MiB at least and 1 GiB at most."""
    return min(max(_CACHES * (last_cache_bytes() or 0), _LEAST), _MOST)


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Standard normal (rows, columns) in bfloat16."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Turns:
    """Hands out `items` one after the other, from the first again after the last: what was used last comes last."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items
        self._next = 0

    def take(self, count: int) -> Iterator[Any]:
        """The next `count`."""
        for _ in range(count):
            yield self._items[self._next]
            self._next = (self._next + 1) % len(self._items)


def parts(shape: Shape, dense_bits: int, head_bits: int, memory: int) -> dict[str, Measured]:
    """The large parts of a shape. memory: bytes of the weights that a part takes in turn. ValueError where the native
    kernels take none of the dense matrices."""
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    return {
        "experts": experts(shape, memory),
        "query": packed_product(queries, shape.hidden, dense_bits, memory),
        "key": packed_product(keys, shape.hidden, dense_bits, memory),
        "attention's output": packed_product(shape.hidden, queries, dense_bits, memory),
        "output layer": packed_product(shape.vocabulary, shape.hidden, head_bits, memory),
    }


def products(shape: Shape, types: dict[str, Encoding], memory: int) -> dict[str, Measured]:
    """Gate and up of a shape's expert in each type, times one token."""
    return {name: product(2 * shape.inner, shape.hidden, type, memory) for name, type in types.items()}


def types_of(text: str) -> dict[str, Encoding]:
    """Of 'q2_k,nl3/cpu-avx512/g64': encodings by name."""
    return {name: encoding_named(name) if "/" in name else gguf_encoding(name) for name in text.split(",")}


def packed_product(out: int, in_: int, bits: int, memory: int) -> Measured:
    return product(out, in_, encoding_for(bits, out, in_, torch.bfloat16), memory)


def product(out: int, in_: int, encoding: Encoding, memory: int) -> Measured:
    """A matrix (out, in_) times one token."""
    form = matrix_form(encoding, out, in_, torch.bfloat16)
    if form is None:
        raise ValueError(f"the native kernels do not take ({out}, {in_}) in {encoding.name} here")
    each = sum(field.nbytes for field in filled(encoding, out, in_).values())
    matrices = [filled(encoding, out, in_) for _ in range(max(memory // each, 1))]
    x = random(1, in_, 1)

    def run() -> None:
        for fields in matrices:
            linear(x, form, fields)

    return Measured(run, each * len(matrices))


def experts(shape: Shape, memory: int) -> Measured:
    """A token's experts at 4 bits, all in one call."""
    gate = gate_named("clamped", 7.0, 1.702) if shape.clamped else gate_named("silu")
    matrices = [Part("gate_up", (2 * shape.inner, shape.hidden)), Part("down", (shape.hidden, shape.inner))]
    biases = [Part(f"{part.name}_bias", part.shape[:1]) for part in matrices] if shape.clamped else []
    encodings = {part.name: encoding_for(4, *part.out_in, torch.bfloat16) for part in matrices}
    layer = MoeLayer("experts", shape.top_k, shape.top_k, (*matrices, *biases))
    form = ExpertFormat(layer, 4, torch.bfloat16, encodings)
    kernel: ExpertKernel = expert_kernel(form, gate, "cpu")
    each = form.slot.nbytes
    tokens = max(memory // (each * shape.top_k), 1)
    slots = []
    for _ in range(tokens * shape.top_k):
        views = form.slot.views(torch.randint(0, 64, (each,), dtype=torch.uint8))
        slots.append(SlotViews(views))
    turns, x = Turns(slots), random(1, shape.hidden, 1)

    def run() -> None:
        for _ in range(tokens):
            kernel.forward_one(x, list(turns.take(shape.top_k)))

    return Measured(run, each * len(slots))


def filled(encoding: Encoding, out: int, in_: int) -> Fields:
    """Fields of a matrix (out, in_) with random codes."""
    found = {}
    for field in encoding.slot_fields(out, in_, torch.bfloat16):
        whole = torch.full(field.shape, 0.01, dtype=field.dtype)
        found[field.name] = (
            whole if field.dtype.is_floating_point else whole.random_(0, 120)
        )  # no float16 of them is infinite
    return found


def measure(
    measured: dict[str, Measured], isas: list[str], threads: int, memory: int, rounds: int
) -> list[dict[str, Any]]:
    """One row for each part and instruction set."""
    torch.set_num_threads(threads)
    buffer = torch.ones(memory // 8, dtype=torch.int64)
    turns = [(name, part, isa) for name, part in measured.items() for isa in isas]
    runs = {f"{name}, {isa}": under(isa, part.run) for name, part, isa in turns}
    seconds = timed({READ: lambda: buffer.sum(), **runs}, rounds, before=settled)
    read = rates(seconds[READ], buffer.nbytes / 1e9)
    rows: list[dict[str, Any]] = [{"part": READ, "threads": threads, "gb_s": read}]
    for name, part, isa in turns:
        took, whole = seconds[f"{name}, {isa}"], part.bytes / buffer.nbytes
        share = spread([whole * plain / own for own, plain in zip(took, seconds[READ], strict=True)])
        gb_s = rates(took, part.bytes / 1e9)
        rows.append({"part": name, "isa": isa, "threads": threads, "gb_s": gb_s, "share": share})
    return rows


def settled() -> None:
    """Waits, at work so that this core keeps its clock, until the threads of torch that a plain read wakes have left
    the other cores to the kernels' own."""
    until = time.perf_counter() + 0.015
    while time.perf_counter() < until:
        pass


def under(isa: str, run: Callable[[], None]) -> Callable[[], None]:
    """`run` with the kernels of an instruction set."""

    def under_it() -> None:
        native.use(isa)
        run()

    return under_it


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=list(SHAPES), help=", ".join(SHAPES))
    parser.add_argument("--threads", type=numbers, default=[1, processors()], help="default 1 and one a core")
    parser.add_argument(
        "--isa",
        type=lambda text: text.split(","),
        default=native.instruction_sets()[:1],
        help=f"default the fastest of {', '.join(native.instruction_sets())}",
    )
    parser.add_argument(
        "--types",
        type=types_of,
        default={},
        help="types of GGUF blocks, or encodings of stores",
    )
    parser.add_argument("--dense-bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--head-bits", type=int, choices=(4, 6, 8), default=6)
    parser.add_argument(
        "--megabytes", type=at_least_one, default=enough_bytes() >> 20, help="MiB of weights; default 4 last caches"
    )
    args = parser.parse_args()
    if unknown := set(args.shapes) - set(SHAPES):
        parser.error(f"there are {', '.join(SHAPES)}, not {', '.join(sorted(unknown))}")
    if unknown := set(args.isa) - set(native.instruction_sets()):
        parser.error(f"this machine has {', '.join(native.instruction_sets())}, not {', '.join(sorted(unknown))}")
    document, table = about(args.rounds), []
    for name in args.shapes:
        document[name] = []
        for threads in dict.fromkeys(args.threads):
            try:
                shape, memory = SHAPES[name], args.megabytes << 20
                measured = (
                    products(shape, args.types, memory)
                    if args.types
                    else parts(shape, args.dense_bits, args.head_bits, memory)
                )
                found = measure(measured, args.isa, threads, memory, args.rounds)
            except ValueError as error:
                parser.error(str(error))
            document[name] += found
            table += [
                [
                    f"{name}, {row['part']}",
                    row.get("isa", ""),
                    str(threads),
                    shown(row["gb_s"]),
                    shown(row.get("share")),
                ]
                for row in found
            ]
    print(json.dumps(document))
    print_table(["", "kernels", "threads", "GB/s", "share of the read"], table)


if __name__ == "__main__":
    main()
