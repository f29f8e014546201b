"""How cost grows: with the number of experts, of layers, of prompt tokens, and with shrinking budgets.

    python -m benchmarks.growth --work FOLDER --report growth.html                  # all four, random checkpoints
    python -m benchmarks.growth --work FOLDER --over budget,prompt --model MODEL    # a real model
    python -m benchmarks.growth --work FOLDER --over experts --values 8,16,32

experts, layers: time of a token with all experts cached, with a share of them (--share), and with one number of them
(--slots; default as many as the smallest model has). prompt: time of the prompt alone. budget: from all experts down to
those of one layer of one token.

Checkpoints are random ones of the shape that the options give, written and packed once below --work (about 8 GB for
what is measured by default). Their routers route all but evenly, so hits are those of no locality: about the share
cached, and what a prefetch adds. Every point is measured as `tiermoe bench` measures, in a fresh process. Prints one
JSON object, and tables on standard error.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.growth.facts import facts_of, model_of
from benchmarks.growth.page import failures, report, table, told
from benchmarks.growth.points import AXES, VALUES, Common, Model, Point, budgets, plan
from benchmarks.growth.reasons import bends, summary
from benchmarks.growth.running import Asked, Running
from benchmarks.random_moe import add_shape, shape_of
from benchmarks.rounds import about, at_least_one, numbers, parser_of, print_table
from tiermoe.bench.cases import groups_asked
from tiermoe.bench.stretches import text_file
from tiermoe.errors import ConfigError, TiermoeError
from tiermoe.process.machine import processors

RANDOM = "Weights and routers are random: routing is all but even, and hits are those of no locality."
NAMED = "The model was named; its routing is that of the text."


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = parser_of("benchmarks.growth", __doc__, rounds=3)
    made.add_argument("--work", type=Path, required=True, help="folder for checkpoints, their stores and scratch")
    made.add_argument("--over", type=axes_asked, default=list(AXES), help="of " + ",".join(AXES) + " (default all)")
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
    made.add_argument("--report", type=Path, help="write plots, reasons and tables into this .html file")
    add_shape(made.add_argument_group("shape of the random checkpoints"))
    return made


def axes_asked(text: str) -> list[str]:
    """Of AXES. ValueError for an unknown one."""
    words = text.split(",")
    if set(words) - set(AXES):
        raise ValueError(f"{text}: there are {', '.join(AXES)}")
    return words


def check(args: argparse.Namespace) -> None:
    """ConfigError for options that contradict each other."""
    if args.values and len(args.over) > 1:
        raise ConfigError("--values is of one axis; name it with --over")
    if args.model and set(args.over) & {"experts", "layers"}:
        raise ConfigError("a model has its own experts and layers; with --model use --over prompt,budget")
    if not 0 < args.share <= 1:
        raise ConfigError(f"--share must be above 0 and at most 1, got {args.share:g}")
    if len(groups_asked(args.tokens)) != 1:
        raise ConfigError("--tokens is one group, like 32x64")


def points_of(over: str, args: argparse.Namespace, model: Model) -> list[Point]:
    """What is measured along one axis. ConfigError for a value that makes no model or no cache."""
    values = args.values or (budgets(model) if over == "budget" else VALUES[over])
    if over == "prompt" and not args.model:
        values = [value for value in values if value < args.context]
    if over == "experts" and min(values) < args.top_k:
        raise ConfigError(f"a token uses {args.top_k} experts; ask for at least as many")
    if over == "budget" and not model.top_k <= min(values) <= max(values) <= model.every:
        raise ConfigError(f"a cache holds {model.top_k} to {model.every} of this model's experts")
    common = Common(args.presets.split(","), args.share, args.slots, groups_asked(args.tokens)[0])
    return plan(over, values, model, common)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The document that is printed; of what has been run, where it is interrupted."""
    check(args)
    model = model_of(args.model, shape_of(args))
    points = {over: points_of(over, args, model) for over in args.over}
    options = {
        "bits": args.bits, "dense_bits": args.dense_bits, "chunk": args.chunk,
        "quantizer": args.quantizer or ("hqq" if args.model else "linear"),
    }  # fmt: skip
    text = text_file(args.text).read_text(encoding="utf-8")
    asked = Asked(args.model, args.work, options, text, args.threads, args.timeout, args.rounds)
    running = Running(asked, [point for each in points.values() for point in each])
    interrupted = False
    try:
        running.run(lambda words: print(words, file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        interrupted = True
    facts = facts_of(model, args.chunk)
    found: dict[str, Any] = {over: {"rows": []} for over in args.over}
    for row in running.rows():
        found[row["over"]]["rows"].append(row)
    for over, axis in found.items():
        axis["bends"] = [bend.as_dict() for bend in bends(over, axis["rows"], facts)]
        axis["summary"] = summary(over, axis["rows"])
    return {
        **about(args.rounds, args.threads), "memory_bandwidth": running.memory_bandwidth, "options": options,
        "note": NAMED if args.model else RANDOM, "interrupted": interrupted, "axes": found,
    }  # fmt: skip


def show(document: dict[str, Any]) -> None:
    """Tables and bends on standard error."""
    for over, found in document["axes"].items():
        print(f"\n{over}", file=sys.stderr)
        print_table(*table(found["rows"]))
        said = [f"({index}) {told(bend)}" for index, bend in enumerate(found["bends"], 1)]
        for words in [*said, *found["summary"], *(f"without figures: {each}" for each in failures(found["rows"]))]:
            print(words, file=sys.stderr)
    print(document["note"], file=sys.stderr)


def main() -> None:
    made = parser()
    args = made.parse_args()
    try:
        document = measure(args)
    except (TiermoeError, ValueError) as error:
        made.error(str(error))
    print(json.dumps(document))
    show(document)
    if args.report is not None:
        args.report.write_text(report(document), encoding="utf-8")
    if document["interrupted"]:
        sys.exit(130)


if __name__ == "__main__":
    main()
