"""How cost grows: with the number of experts, of layers, of prompt tokens, and with shrinking budgets.

    python -m benchmarks.growth --work FOLDER --report growth.html                  # all four, random checkpoints
    python -m benchmarks.growth --work FOLDER --over budget,prompt --model MODEL    # a real model
    python -m benchmarks.growth --work FOLDER --over experts --values 8,16,32

experts, layers: time of a token with all experts cached, with a share of them (--share), and with one number of them
(--slots; default as many as the smallest model has). prompt: time of the prompt alone. budget: from all experts down to
those of one layer of one token.

Checkpoints are Qwen3-MoE ones of the shape that the options give with random weights (`benchmarks.random_model`),
written and packed once below --work (about 8 GB for what is measured by default). Their routers route all but evenly,
so hits are those of no locality: about the share cached, and what a prefetch adds. Every point is measured as `tiermoe
bench` measures, in a fresh process, its files dropped from the page cache before. Prints one JSON object, and tables on
standard error; --report draws a picture an axis (with `pip install 'tiermoe[plots]'`).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.random_model import config_of, write
from benchmarks.rounds import about, at_least_one, numbers, parser_of, print_table, say, shown
from tiermoe.errors import ConfigError, TiermoeError
from tiermoe.lab.bench.cases import OURS, Case, Condition, Measured, alternating, check_lengths, parse_groups, text_file
from tiermoe.lab.bench.child import drop_from_page_cache
from tiermoe.lab.bench.engines import Common, Tiermoe
from tiermoe.lab.bench.plots import curves, require_plots
from tiermoe.lab.bench.report import machine_words, page
from tiermoe.lab.bench.session import Subject, memory_bandwidth
from tiermoe.lab.bench.summary import number, share, size, summarise
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.hf.hub import resolve_model
from tiermoe.platform.machine import processors

AXES = {
    "experts": "experts in each layer",
    "layers": "layers",
    "prompt": "tokens of the prompt",
    "budget": "experts that the cache holds",
}
VALUES: dict[str, tuple[int, ...]] = {
    "experts": (8, 16, 32, 64, 128),
    "layers": (2, 4, 8, 16),
    "prompt": (16, 32, 64, 128, 256, 512, 1024, 2048),
}
"""Where nothing else is asked; a budget's values follow from the model (`budgets`)."""
RANDOM = "Weights and routers are random: routing is all but even, and hits are those of no locality."
NAMED = "The model was named; its routing is that of the text."

_MULTIPLE = 64  # of sizes, which our own kernels take
_VOCABULARY = 4096  # of the tokenizer of random checkpoints
_FIGURES = ("error", "decode_tok_s", "prefill_tok_s", "hit_rate", "belady_hit_rate", "bytes_per_token", "bound_tok_s",
            "compute_bound_tok_s", "link_bandwidth", "compute_ms", "wait_ms", "framework_ms", "slots",
            "peak_memory_bytes", "lossy")  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Sizes of a random checkpoint."""

    experts: int = 32  # of a layer
    layers: int = 4
    top_k: int = 4  # experts of a token in each layer
    hidden: int = 1024
    inner: int = 512  # units of an expert
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    context: int = 4096  # positions

    @property
    def name(self) -> str:
        """A folder's name that tells the shape."""
        return (
            f"moe-e{self.experts}-l{self.layers}-k{self.top_k}-h{self.hidden}-i{self.inner}"
            f"-a{self.heads}x{self.kv_heads}x{self.head_dim}-c{self.context}"
        )

    def check(self) -> None:
        """ConfigError for sizes that make no model, or none that all kernels take."""
        small = [name for name, value in asdict(self).items() if value < 1]
        if small:
            raise ConfigError(f"{', '.join(small)} must be at least 1")
        if self.hidden % _MULTIPLE or self.inner % _MULTIPLE or self.heads * self.head_dim % _MULTIPLE:
            raise ConfigError(f"hidden, inner and heads x head_dim must be multiples of {_MULTIPLE}")
        if self.head_dim % 2 or self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} heads of {self.head_dim} do not share {self.kv_heads} key/value heads")
        if self.top_k > self.experts:
            raise ConfigError(f"a token cannot use {self.top_k} of {self.experts} experts")

    def ensure(self, work: Path) -> Path:
        """The folder of the checkpoint below `work`, written where it is not there yet. ConfigError as `check`."""
        self.check()
        out = work / self.name
        if not out.exists():
            say(f"writing {self.name}")
            config = config_of(
                "qwen3-30b-a3b", self.layers, vocab_size=_VOCABULARY, num_experts=self.experts,
                num_experts_per_tok=self.top_k, hidden_size=self.hidden, moe_intermediate_size=self.inner,
                intermediate_size=2 * self.inner, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
                head_dim=self.head_dim, max_position_embeddings=self.context,
            )  # fmt: skip
            write("qwen3-30b-a3b", out, config)
        return out


@dataclass(frozen=True)
class Model:
    """What runs."""

    layers: int
    experts: int  # of each layer
    top_k: int
    shape: Shape | None = None  # of a random checkpoint; None: the model that was named

    @property
    def every(self) -> int:
        """Experts of all layers."""
        return self.layers * self.experts

    def part(self, share: float) -> int:
        """A share of the experts, and as many at least as one layer's token uses."""
        return max(int(share * self.every), self.top_k)


@dataclass(frozen=True)
class Run:
    """What a process of its own does."""

    model: Model
    preset: str
    slots: int  # experts that the cache holds
    prompt: int
    output: int  # tokens; 0: the prompt alone


@dataclass(frozen=True)
class Point:
    """One place of one line."""

    over: str  # the axis
    series: str  # the line
    x: int
    run: Run


def random_model(shape: Shape) -> Model:
    """A random checkpoint."""
    return Model(shape.layers, shape.experts, shape.top_k, shape)


def model_of(name: str | None, shape: Shape) -> Model:
    """The model along prompts and budgets: the one that was named, or a random one. ConfigError where layers differ."""
    if name is None:
        return random_model(shape)
    layers = inspect_model(resolve_model(name), name).layers
    if len({(layer.experts, layer.top_k) for layer in layers}) > 1:
        raise ConfigError(f"the MoE layers of {name} differ in experts; only models with equal layers have these axes")
    return Model(len(layers), layers[0].experts, layers[0].top_k)


def budgets(model: Model) -> list[int]:
    """Caches in experts: all of them, halves of that and what lies between, what one token uses, and the least that
    runs: one layer's K."""
    found = {model.every, model.layers * model.top_k, model.top_k}
    size = model.every
    while size > model.top_k:
        found |= {size, max(size * 3 // 4, model.top_k)}
        size //= 2
    return sorted(found)


def plan(
    over: str, values: Sequence[int], model: Model, presets: Sequence[str], share: float, slots: int | None,
    tokens: tuple[int, int],
) -> list[Point]:  # fmt: skip
    """The points along one axis, line after line. share: of the experts, for the line of equal shares; slots: of the
    line of equal caches, None as many as the smallest model has; tokens: (prompt, output) in decode."""
    values = sorted(values)
    models = dict.fromkeys(values, model)
    if over in ("experts", "layers"):
        assert model.shape is not None
        models = {x: random_model(replace(model.shape, **{over: x})) for x in values}
    whole, part = "all experts cached", f"{share:.0%} of the experts cached"
    lines = {whole: [each.every for each in models.values()], part: [each.part(share) for each in models.values()]}
    if over == "budget":
        lines = {"cached": list(values)}
    elif over != "prompt":
        held = slots or models[values[0]].every
        lines[f"{held} experts cached"] = [min(held, each.every) for each in models.values()]
    return [
        Point(
            over, f"{line}, {preset}" if len(presets) > 1 else line, x,
            Run(models[x], preset, count, *((x, 0) if over == "prompt" else tokens)),
        )
        for preset in presets
        for line, counts in lines.items()
        for x, count in zip(values, counts, strict=True)
    ]  # fmt: skip


def cache_share(slots: int, every: int) -> str:
    """What `cache` says for `slots` of `every` expert."""
    return f"{min(100 * (slots + 0.5) / every, 100):.9f}%"


Once = Callable[[], dict[str, Any]]
"""One run in a process of its own."""


def prepared(run: Run, args: argparse.Namespace, options: dict[str, Any], text: str, scratch: Path) -> Once:
    """What runs once; its checkpoint and store are made here, where they are not there yet."""
    shape, condition = run.model.shape, Condition(None, run.prompt, run.output)
    subject = Subject(args.model if shape is None else str(shape.ensure(args.work)), text)
    check_lengths([condition], len(subject.ids), subject.context)
    folder = scratch / subject.directory.name
    folder.mkdir(exist_ok=True)
    options = {**options, "cache": cache_share(run.slots, run.model.every)}
    if shape is not None:
        options["store"] = str(args.work / "stores" / shape.name)
    files = subject.ensure_packed(run.preset, options, lambda what, done, total: say(what) if done == 0 else None)
    common = Common(subject.directory, args.threads, args.timeout, folder)
    engine = Tiermoe(run.preset, options, common, lambda _: files, args.memory_bandwidth)

    def once() -> dict[str, Any]:
        drop_from_page_cache(files)
        return engine.run(condition, subject.ids_file(condition, folder))

    return once


def run_all(measured: dict[Run, Measured], prepare: Callable[[Run], Once], rounds: int) -> None:
    """Runs everything, alternating, with a line for each run that ends, and keeps it in `measured`, where an
    interrupted measurement finds what there is. A run that fails is a result and is not repeated."""
    calls = [(run, prepare(run)) for run in measured]
    for done, (round_, (run, call)) in enumerate(alternating(calls, rounds), 1):
        row = measured[run]
        if row.error is not None:
            continue
        try:
            row.rounds[round_] = call()
            told = f"{row.rounds[round_]['decode_tok_s'] or row.rounds[round_]['prefill_tok_s']:.2f} tok/s"
        except TiermoeError as error:
            row.error = told = str(error)
        model = run.model
        say(f"[{done}/{rounds * len(calls)}] {model.layers} x {model.experts} experts, {run.slots} cached, "
            f"{row.case.condition.group}, {run.preset}: {told}")  # fmt: skip


def row_of(point: Point, measured: Measured) -> dict[str, Any]:
    """A point's figures, flat."""
    (summary,), run, model = summarise([measured]), point.run, point.run.model
    return {
        "series": point.series, "x": point.x, "preset": run.preset, "layers": model.layers, "experts": model.experts,
        "top_k": model.top_k, "cache": run.slots, "prompt": run.prompt, "output": run.output,
        **{name: summary[name] for name in _FIGURES},
    }  # fmt: skip


def cost(row: dict[str, Any]) -> dict[str, float] | None:
    """{median, low, high} in seconds: of a decoded token, or of the whole prompt where nothing is decoded. None where
    the run gave no figures."""
    speed, tokens = (row["decode_tok_s"], 1) if row["output"] else (row["prefill_tok_s"], row["prompt"])
    if speed is None:
        return None
    return {"median": tokens / speed["median"], "low": tokens / speed["high"], "high": tokens / speed["low"]}


def exponents(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Between neighbours of a line: e where the cost grows as x to the power e (1: in proportion, 0: not at all)."""
    costs = [(row["x"], found["median"]) for row in rows if (found := cost(row))]
    return [math.log(b / a) / math.log(y / x) for (x, a), (y, b) in pairwise(costs)]


def lines_of(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Line → its points that have figures, by rising x."""
    names = dict.fromkeys(row["series"] for row in rows)
    good = sorted((row for row in rows if cost(row)), key=lambda row: int(row["x"]))
    return {name: [row for row in good if row["series"] == name] for name in names}


def picture(over: str, rows: Sequence[dict[str, Any]]) -> str:
    """The curves of an axis, as SVG text: seconds of a token, or of the prompt, beside the bound."""
    drawn = []
    for name, points in lines_of(rows).items():
        places = [(row["x"], found["low"], found["median"], found["high"]) for row in points if (found := cost(row))]
        key, of = ("bound_tok_s", "output") if over != "prompt" else ("compute_bound_tok_s", "prompt")
        bounds = [(row["x"], (1 if of == "output" else row[of]) / row[key]) for row in points if row[key]]
        drawn.append((name, places, bounds))
    what = "seconds of the prompt" if over == "prompt" else "seconds of a token"
    dashes = "the run's own computing and reading, overlapped" if over == "prompt" else "bound (Belady's misses)"
    return curves(f"Cost over {AXES[over]}", AXES[over], what, drawn, dashes)


def table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells."""
    head = ["line", "at", "cached", "decode tok/s", "prefill tok/s", "bound", "hits", "Belady's", "read a token"]
    cells = [
        [
            row["series"], str(row["x"]), f"{row['cache']} of {row['layers'] * row['experts']}",
            shown(row["decode_tok_s"]), shown(row["prefill_tok_s"]), number(row["bound_tok_s"]), share(row["hit_rate"]),
            share(row["belady_hit_rate"]), size(row["bytes_per_token"]),
        ]
        for row in rows
        if not row["error"]
    ]  # fmt: skip
    return head, cells


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The document that is printed; of what has been run, where it is interrupted."""
    check(args)
    shape = Shape(**{field.name: getattr(args, field.name) for field in fields(Shape)})
    shape.check()
    model = model_of(args.model, shape)
    points = [point for over in args.over for point in points_of(over, args, model)]
    quantizer = args.quantizer or ("hqq" if args.model else "linear")
    options = {"bits": args.bits, "dense_bits": args.dense_bits, "chunk": args.chunk, "quantizer": quantizer}
    text = text_file(args.text).read_text(encoding="utf-8")
    args.memory_bandwidth = memory_bandwidth(args.threads, args.timeout)
    args.work.mkdir(parents=True, exist_ok=True)
    runs = dict.fromkeys(point.run for point in points)
    measured = {run: Measured(Case(OURS, run.preset, Condition(None, run.prompt, run.output))) for run in runs}
    interrupted = False
    with tempfile.TemporaryDirectory(prefix=".growth-", dir=args.work) as folder:
        try:
            run_all(measured, lambda run: prepared(run, args, options, text, Path(folder)), args.rounds)
        except KeyboardInterrupt:
            interrupted = True
    axes: dict[str, Any] = {over: {"rows": []} for over in args.over}
    for point in points:
        if measured[point.run].rounds or measured[point.run].error:
            axes[point.over]["rows"].append(row_of(point, measured[point.run]))
    for axis in axes.values():
        axis["exponents"] = {name: exponents(rows) for name, rows in lines_of(axis["rows"]).items()}
    return {
        **about(args.rounds, args.threads), "memory_bandwidth": args.memory_bandwidth, "options": options,
        "note": NAMED if args.model else RANDOM, "interrupted": interrupted, "axes": axes,
    }  # fmt: skip


def check(args: argparse.Namespace) -> None:
    """ConfigError for options that contradict each other."""
    if args.values and len(args.over) > 1:
        raise ConfigError("--values is of one axis; name it with --over")
    if args.model and set(args.over) & {"experts", "layers"}:
        raise ConfigError("a model has its own experts and layers; with --model use --over prompt,budget")
    if not 0 < args.share <= 1:
        raise ConfigError(f"--share must be above 0 and at most 1, got {args.share:g}")
    if len(parse_groups(args.tokens)) != 1:
        raise ConfigError("--tokens is one group, like 32x64")
    if args.report is not None:
        require_plots()


def points_of(over: str, args: argparse.Namespace, model: Model) -> list[Point]:
    """What is measured along one axis. ConfigError for a value that makes no model or no cache."""
    values = args.values or (budgets(model) if over == "budget" else VALUES[over])
    if over == "prompt" and not args.model:
        values = [value for value in values if value < args.context]
    if over == "experts" and min(values) < args.top_k:
        raise ConfigError(f"a token uses {args.top_k} experts; ask for at least as many")
    if over == "budget" and not model.top_k <= min(values) <= max(values) <= model.every:
        raise ConfigError(f"a cache holds {model.top_k} to {model.every} of this model's experts")
    return plan(over, values, model, args.presets.split(","), args.share, args.slots, parse_groups(args.tokens)[0])


def parse_axes(text: str) -> list[str]:
    """Of AXES. ValueError for an unknown one."""
    words = text.split(",")
    if set(words) - set(AXES):
        raise ValueError(f"{text}: there are {', '.join(AXES)}")
    return words


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = parser_of(__doc__, rounds=3)
    made.add_argument("--work", type=Path, required=True, help="folder for checkpoints, their stores and scratch")
    made.add_argument("--over", type=parse_axes, default=list(AXES), help="of " + ",".join(AXES) + " (default all)")
    made.add_argument("--values", type=numbers, help="the points of the one axis that --over names")
    made.add_argument("--model", help="a directory or hub id, for prompt and budget (default a random checkpoint)")
    made.add_argument("--share", type=float, default=0.5, help="of the experts that are cached (default 0.5)")
    made.add_argument("--slots", type=at_least_one, help="experts cached on the line of equal caches")
    made.add_argument("--tokens", default="32x64", help="prompt and output of a decode (default 32x64)")
    made.add_argument("--presets", default="default", help="names with commas; a line for each (default: default)")
    made.add_argument("--threads", type=at_least_one, default=processors(), help="default one a core")
    made.add_argument("--bits", type=int, default=4, help="of the experts (default 4)")
    made.add_argument("--dense-bits", type=int, default=4, help="of the other linear layers (default 4)")
    made.add_argument(
        "--quantizer", choices=("hqq", "linear"), help="default linear, which packs fast; with --model hqq"
    )
    made.add_argument("--chunk", type=at_least_one, default=512, help="tokens of a prompt run at once (default 512)")
    made.add_argument("--text", type=Path, help="UTF-8 text that is fed (default the held-out one)")
    made.add_argument("--timeout", type=float, default=600.0, help="seconds of one run (default 600)")
    made.add_argument("--report", type=Path, help="draw a picture an axis into this .html file")
    shape = made.add_argument_group("shape of the random checkpoints")
    for field in fields(Shape):
        name = field.name.replace("_", "-")
        shape.add_argument(f"--{name}", type=int, default=field.default, help=f"default {field.default}")
    return made


def main() -> None:
    made = parser()
    args = made.parse_args()
    try:
        document = measure(args)
    except TiermoeError as error:
        made.error(str(error))
    print(json.dumps(document))
    for over, axis in document["axes"].items():
        say(f"\n{over}")
        print_table(*table(axis["rows"]))
        for name, found in axis["exponents"].items():
            say(f"{name}: exponents {', '.join(f'{each:.2f}' for each in found)}")
        for row in axis["rows"]:
            if row["error"]:
                say(f"without figures: {row['series']}, at {row['x']}: {row['error']}")
    say(document["note"])
    if args.report is not None:
        drawn = [picture(over, axis["rows"]) for over, axis in document["axes"].items()]
        machine = {**document["machine"], "memory_bandwidth": document["memory_bandwidth"]}
        args.report.write_text(page("How cost grows", [machine_words(machine), *drawn]), encoding="utf-8")
    if document["interrupted"]:
        sys.exit(130)


if __name__ == "__main__":
    main()
