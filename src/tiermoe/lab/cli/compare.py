"""`tiermoe compare`: presets, or variants of them, on one text and budget, in a table and a picture."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tiermoe.cli import options as opt
from tiermoe.cli.output import note, progress_bar
from tiermoe.cli.terminal import WIDE, Terminal
from tiermoe.config import format_size, parse_cache, parse_size, settings
from tiermoe.errors import ConfigError
from tiermoe.lab.cli import options as lab
from tiermoe.lab.cli.evaluate import scored
from tiermoe.lab.cli.variants import (
    Column,
    Ladder,
    Picture,
    Sweep,
    check_picture,
    check_settings,
    counter_columns,
    failures,
    naming_columns,
    ratio_columns,
    variants,
    write_picture,
)
from tiermoe.lab.measure.compare import Case, Measured, Variant, evaluate_apart, measure_all, summarise
from tiermoe.platform.built import require_kernels


@opt.engine_options(without=["context", "preset", "also"])
def compare(
    model: opt.Model,
    options: dict[str, Any],
    text: lab.ScoredText = None,
    pairs: lab.ScoredPairs = None,
    metric: lab.ScoredMetric = "perplexity",
    presets: Annotated[str, typer.Option(help="all, or names with commas.")] = "all",
    sweep: Sweep = None,
    ladder: Ladder = False,
    tokens: lab.ScoredTokens = 512,
    window: lab.Window = 128,
    prompt: lab.WindowPrompt = None,
    rounds: Annotated[int, typer.Option(help="Times that each row is measured.")] = 3,
    reference: lab.Reference = "16bit",
    picture: Picture = None,
    without_kernels: lab.WithoutKernels = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects, one for each row.")] = False,
) -> None:
    """Measure presets on the same text, or summaries, and budget: speed, bytes, hits, and quality against 16 bits.

    Each preset runs once a round, in a process of its own, from an empty cache
    that a window which is not scored warms. Progress says how long it takes.
    --sweep takes cache, memory and prompt beside the settings of --set.

    decode, prefill tok/s: medians over the rounds; range: decode's.
    / lru: median of the ratios to that preset's decode speed within a round;
    / first, / before: to the first row of a ladder, and to the row before.
    read a token: what a decoded token reads from the store.
    hits: share of the experts that were in memory when they were asked for.
    loss: of perplexity or ROUGE-2, against the checkpoint's own weights.
    KL: divergence from those weights' distribution of the next token.
    same top-1: how often the likeliest token is the same as theirs.
    ±: standard error over the windows. --json has more: waiting, peak memory.
    The second table has what parts did, where they did anything.
    """
    settings(**options)
    require_kernels(without_kernels)
    material = lab.read_material(text, pairs, prompt)
    given = options.pop("set", {})
    swept = {"cache": parse_cache, "memory": lambda value: parse_size(value, "memory"), "prompt": _prompt}
    rows = variants(presets, given, sweep, ladder, options, swept)
    check_settings(rows)
    if rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {rounds}")
    if picture is not None:
        check_picture(picture)
        if metric == "rouge2" and reference == "none":
            raise ConfigError(
                "--picture draws what ROUGE-2 loses against the 16-bit weights; leave out --reference none"
            )
    shape = (material.prompt, window, tokens)
    case = Case(model, material.text, shape, options, reference, pairs=material.pairs, metric=metric)
    measured = _measure(case, rows, rounds)
    failed = failures(measured, "measured")
    results = summarise(measured)
    whole = [result for result in results if "error" not in result]
    if as_json:
        print(json.dumps(results))
    else:
        _print(whole, failed)
    if picture is not None:
        write_picture(picture, whole)


def _prompt(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"prompt must be a number of tokens from 1 on, got '{text}'")
    return int(text)


def _measure(case: Case, rows: list[Variant], rounds: int) -> list[Measured]:
    references: dict[tuple[int, int, int], str] = {}  # of each shape of windows

    def measure(row: Variant) -> dict[str, Any]:
        mine = _case(case, row)
        return evaluate_apart(replace(mine, reference=references.get(mine.shape, case.reference)), progress)

    with tempfile.TemporaryDirectory() as folder, progress_bar() as progress:
        for shape in dict.fromkeys(_case(case, row).shape for row in rows):
            if case.reference == "16bit":
                file = Path(folder) / f"reference-{shape[0]}"
                evaluate_apart(replace(case, shape=shape, reference=str(file), save=file), progress)
                references[shape] = str(file)
        return measure_all(rows, rounds, measure, lambda done, total: progress("measuring presets", done, total))


def _case(case: Case, row: Variant) -> Case:
    """What the process of a row evaluates."""
    options = {**case.options, "preset": row.preset, **({"set": dict(row.set)} if row.set else {}), **row.options}
    prompt, window, tokens = case.shape
    return replace(case, shape=(options.pop("prompt", prompt), window, tokens), options=options)


def _print(results: list[dict[str, Any]], failed: list[str]) -> None:
    console = Terminal(piped=WIDE)
    naming = naming_columns(results)
    console.print(_table([*naming, *_columns(results)], results))
    if counters := counter_columns(results):
        console.print(_table([*naming, *counters], results))
    if any(result["lossy"] for result in results):
        note("* lossy: may change what the model says")
    first, kernels = results[0], " and ".join(dict.fromkeys(result["kernels"] for result in results))
    note(
        f"[{scored(first)}; kernels {kernels}; compute threads: {first['threads']}; rounds: {first['rounds']}; the "
        f"figures: tiermoe compare --help]"
    )
    for line in failed:
        note(f"not measured: {line}")


def _table(columns: list[Column], results: list[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0)
    for index, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for result in results:
        table.add_row(*(show(result) for _, show in columns))
    return table


def _columns(results: list[dict[str, Any]]) -> list[Column]:
    from tiermoe.lab.bench.report import speed_in_figures

    columns: list[Column] = [
        ("bits", lambda row: str(row["bits"])),
        ("cached", lambda row: f"{row['cache_fraction']:.0%}"),
        ("decode\ntok/s", lambda row: speed_in_figures(row["decode_tok_s"])),
        ("range", lambda row: "–".join(map(speed_in_figures, row["decode_tok_s_range"]))),
        *ratio_columns(results),
        ("prefill\ntok/s", lambda row: speed_in_figures(row["prefill_tok_s"])),
        ("read a\ntoken", lambda row: format_size(row["bytes_per_token"])),
        ("hits", lambda row: f"{row['hit_rate']:.0%}"),
    ]
    if all("rouge2" in result for result in results):
        losses: list[Column] = [("loss, %", lambda row: _with_error(row, "rouge2_loss", ".1f", 100))]
        compared = all("rouge2_loss" in result for result in results)
        return [*columns, ("ROUGE-2", lambda row: _with_error(row, "rouge2", ".3f")), *(losses if compared else [])]
    if not all("kl" in result for result in results):
        return [*columns, ("perplexity", lambda row: f"{row['perplexity']:.4g}")]
    return [
        *columns,
        ("loss, %", lambda row: _with_error(row, "perplexity_loss", ".1f", 100)),
        ("KL, nats", lambda row: _with_error(row, "kl", ".2g")),
        ("same\ntop-1", lambda row: f"{row['same_top1']:.1%}"),
    ]


def _with_error(row: dict[str, Any], name: str, form: str, times: int = 1) -> str:
    error = row[f"{name}_se"]
    return f"{row[name] * times:{form}}" + ("" if error is None else f" ± {error * times:.1g}")
