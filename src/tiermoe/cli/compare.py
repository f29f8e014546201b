"""`tiermoe compare`: presets on one text and budget, in a table and a picture."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tiermoe.bench.plots import compare_presets, require_plots, speed_in_figures
from tiermoe.cli import options as opt
from tiermoe.cli.evaluate import scored
from tiermoe.cli.output import note, progress_bar
from tiermoe.cli.terminal import Terminal
from tiermoe.config import format_size, settings
from tiermoe.errors import ConfigError
from tiermoe.measure.compare import BASELINES, Case, evaluate_apart, measure_all, presets_asked, summarise

_WIDE = 120  # columns of a table that goes to a file or a pipe


@opt.engine_options(without=["context", "preset", "set", "also"])
def compare(
    model: opt.Model,
    options: dict[str, Any],
    text: opt.ScoredText = None,
    pairs: opt.ScoredPairs = None,
    metric: opt.ScoredMetric = "perplexity",
    presets: Annotated[str, typer.Option(help="all, or names with commas.")] = "all",
    tokens: opt.ScoredTokens = 512,
    window: opt.Window = 128,
    prompt: opt.WindowPrompt = None,
    rounds: Annotated[int, typer.Option(help="Times that each preset is measured.")] = 3,
    reference: opt.Reference = "16bit",
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw speed over quality into this .svg file.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects, one for each preset.")] = False,
) -> None:
    """Measure presets on the same text, or summaries, and budget: speed, bytes, hits, and quality against 16 bits.

    Each preset runs once a round, in a process of its own, from an empty cache
    that a window which is not scored warms. Progress says how long it takes.

    decode, prefill tok/s: medians over the rounds; range: decode's.
    / lru: median of the ratios to that preset's decode speed within a round.
    read a token: what a decoded token reads from the store.
    hits: share of the experts that were in memory when they were asked for.
    loss: of perplexity or ROUGE-2, against the checkpoint's own weights.
    KL: divergence from those weights' distribution of the next token.
    same top-1: how often the likeliest token is the same as theirs.
    ±: standard error over the windows. --json has more: waiting, peak memory.
    """
    settings(**options)
    material = opt.read_material(text, pairs, prompt)
    names = presets_asked(presets)
    if rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {rounds}")
    if picture is not None:
        _check_picture(picture)
        if metric == "rouge2" and reference == "none":
            raise ConfigError(
                "--picture draws what ROUGE-2 loses against the 16-bit weights; leave out --reference none"
            )
    shape = (material.prompt, window, tokens)
    case = Case(model, material.text, shape, options, reference, pairs=material.pairs, metric=metric)
    results = _measure(case, names, rounds)
    if all("error" in result for result in results):
        raise ConfigError(f"no preset could be measured; {results[0]['preset']}: {results[0]['error']}")
    if as_json:
        print(json.dumps(results))
    else:
        _print(results)
    if picture is not None:
        _write(picture, compare_presets(results))


def _measure(case: Case, names: list[str], rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, progress_bar() as progress:
        if case.reference == "16bit":
            case = replace(case, reference=str(Path(folder) / "reference"))
            evaluate_apart(replace(case, save=Path(case.reference)), progress)
        rows = measure_all(
            names,
            rounds,
            lambda preset: evaluate_apart(replace(case, options={**case.options, "preset": preset}), progress),
            lambda done, total: progress("measuring presets", done, total),
        )
    return summarise(rows)


def _check_picture(picture: Path) -> None:
    if picture.suffix != ".svg":
        raise ConfigError(f"the picture {picture} must be named .svg; a browser shows it and converts it")
    if not picture.absolute().parent.is_dir():
        raise ConfigError(f"the picture's folder {picture.parent} does not exist; make it first")
    require_plots()


def _write(picture: Path, drawing: str) -> None:
    try:
        picture.write_text(drawing, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the picture {picture} cannot be written: {error.strerror}; name another file") from error


def _print(results: list[dict[str, Any]]) -> None:
    console = Terminal(piped=_WIDE)
    measured = [result for result in results if "error" not in result]
    console.print(_table(measured))
    if any(result["lossy"] for result in measured):
        note("* lossy: may change what the model says")
    rounds, threads = measured[0]["rounds"], measured[0]["threads"]
    note(f"[{scored(measured[0])}; compute threads: {threads}; rounds: {rounds}; the figures: tiermoe compare --help]")
    for result in results:
        if "error" in result:
            note(f"{result['preset']} was not measured: {result['error']}")


def _table(results: list[dict[str, Any]]) -> Table:
    columns = _columns(results)
    table = Table(box=SIMPLE_HEAD, padding=0)
    for index, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for result in results:
        table.add_row(*(show(result) for _, show in columns))
    return table


Column = tuple[str, Callable[[dict[str, Any]], str]]
"""(heading, function from a row of results to the cell's text)."""


def _columns(results: list[dict[str, Any]]) -> list[Column]:
    ratios = {f"/ {name}".replace("-", "-\n"): f"decode_vs_{name.replace('-', '_')}" for name in BASELINES}
    columns: list[Column] = [
        ("preset", lambda row: row["preset"] + (" *" if row["lossy"] else "")),
        ("bits", lambda row: str(row["bits"])),
        ("cached", lambda row: f"{row['cache_fraction']:.0%}"),
        ("decode\ntok/s", lambda row: speed_in_figures(row["decode_tok_s"])),
        ("range", lambda row: "–".join(map(speed_in_figures, row["decode_tok_s_range"]))),
        *((heading, _ratio(key)) for heading, key in ratios.items() if key in results[0]),
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


def _ratio(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[key]:.2f}" if key in row else ""


def _with_error(row: dict[str, Any], name: str, form: str, times: int = 1) -> str:
    error = row[f"{name}_se"]
    return f"{row[name] * times:{form}}" + ("" if error is None else f" ± {error * times:.1g}")
