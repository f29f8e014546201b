"""`tiermoe compare`: presets side by side on one text, in one table and one picture."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tiermoe.cli import options as opt
from tiermoe.cli.chart import draw
from tiermoe.cli.evaluate import Prompt, TextFile, Tokens, Window, read_text, scored
from tiermoe.cli.output import note, progress_bar, waiting
from tiermoe.cli.terminal import Terminal
from tiermoe.config import format_size, settings
from tiermoe.errors import ConfigError
from tiermoe.measure.compare import BASELINES, eval_in_process, measure_all, presets_asked, summarise

_WIDE = 200  # columns of a table that goes to a file or a pipe


@opt.engine_options(without=["context", "preset", "set"])
def compare(
    model: opt.Model,
    text: TextFile,
    options: dict[str, Any],
    presets: Annotated[str, typer.Option(help="all, or names with commas.")] = "all",
    tokens: Tokens = 1024,
    window: Window = 256,
    prompt: Prompt = 32,
    rounds: Annotated[int, typer.Option(help="Times that each preset is measured.")] = 3,
    reference: Annotated[
        str, typer.Option(help="Compare with the checkpoint's own weights: 16bit, none, or a saved file.")
    ] = "16bit",
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw speed over quality into this .svg file.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects, one for each preset.")] = False,
) -> None:
    """Measure presets on the same text and budget: speed, bytes, hits, waiting, and quality against 16 bits."""
    settings(**options)
    read_text(text)
    names = presets_asked(presets)
    if rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {rounds}")
    if picture is not None:
        _check_picture(picture)
    words = [model, *_words({**options, "text": text, "tokens": tokens, "window": window, "prompt": prompt})]
    results = _measure(names, rounds, words, reference)
    if all("error" in result for result in results):
        raise ConfigError(f"no preset could be measured; {results[0]['preset']}: {results[0]['error']}")
    if as_json:
        print(json.dumps(results))
    else:
        _print(results)
    if picture is not None:
        _write(picture, draw(results))


def _words(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _measure(names: list[str], rounds: int, words: list[str], reference: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        if reference == "16bit":
            with waiting("scoring the 16-bit weights"):
                reference = str(Path(folder) / "reference")
                eval_in_process([*words, "--save-reference", reference])
        with progress_bar() as progress:
            rows = measure_all(
                names,
                rounds,
                lambda preset: eval_in_process([*words, "--preset", preset, "--reference", reference]),
                lambda done, total: progress("measuring presets", done, total),
            )
    return summarise(rows)


def _check_picture(picture: Path) -> None:
    if picture.suffix != ".svg":
        raise ConfigError(f"the picture {picture} must be named .svg; a browser shows it and converts it")
    if not picture.absolute().parent.is_dir():
        raise ConfigError(f"the picture's folder {picture.parent} does not exist; make it first")


def _write(picture: Path, drawing: str) -> None:
    try:
        picture.write_text(drawing, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the picture {picture} cannot be written: {error.strerror}; name another file") from error


def _print(results: list[dict[str, Any]]) -> None:
    console = Terminal()
    console = console if console.is_terminal else Terminal(width=_WIDE)
    measured = [result for result in results if "error" not in result]
    console.print(_table(measured))
    if any(result["lossy"] for result in measured):
        note("* lossy: may change what the model says")
    rounds, threads = measured[0]["rounds"], measured[0]["threads"]
    note(
        f"[{scored(measured[0])}; compute threads: {threads}; rounds: {rounds}, of which medians and decode's range; "
        f"± is the standard error over windows]"
    )
    for result in results:
        if "error" in result:
            note(f"{result['preset']} was not measured: {result['error']}")


def _table(results: list[dict[str, Any]]) -> Table:
    columns = _columns(results[0], results)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="right" if index else "left", no_wrap=not index, overflow="fold")
    for result in results:
        table.add_row(*(show(result) for _, show in columns))
    return table


def _columns(first: dict[str, Any], results: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    columns: list[tuple[str, Any]] = [
        ("preset", lambda row: row["preset"] + (" *" if row["lossy"] else "")),
        ("bits", lambda row: str(row["bits"])),
        ("cached", lambda row: f"{row['cache_fraction']:.0%}"),
        ("decode tok/s", lambda row: f"{row['decode_tok_s']:.1f}"),
        ("range", lambda row: "–".join(f"{value:.1f}" for value in row["decode_tok_s_range"])),
        *_ratio_columns(first, "decode"),
        ("prefill tok/s", lambda row: f"{row['prefill_tok_s']:.1f}"),
        *_ratio_columns(first, "prefill"),
        ("read a token", lambda row: format_size(row["bytes_per_token"])),
        ("hits", lambda row: f"{row['hit_rate']:.1%}"),
        ("waited", lambda row: f"{row['wait_s']:.1f} s"),
        ("perplexity", lambda row: f"{row['perplexity']:.4g}"),
    ]
    if any("kl" in result for result in results):
        columns += [
            ("loss", lambda row: f"{row['perplexity_loss']:.2%}" + _error(row, "perplexity_loss", ".2%")),
            ("KL, nats", lambda row: f"{row['kl']:.3g}" + _error(row, "kl", ".1g")),
            ("same top-1", lambda row: f"{row['same_top1']:.1%}"),
        ]
    return columns


def _ratio_columns(first: dict[str, Any], phase: str) -> list[tuple[str, Any]]:
    keys = [(baseline, f"{phase}_vs_{baseline.replace('-', '_')}") for baseline in BASELINES]
    return [(f"/ {baseline}".replace("on-", "on-\n"), _ratio_of(key)) for baseline, key in keys if key in first]


def _ratio_of(key: str) -> Any:
    return lambda row: f"{row[key]:.2f}" if key in row else ""


def _error(row: dict[str, Any], name: str, form: str) -> str:
    error = row[f"{name}_se"]
    return "" if error is None else f" ± {error:{form}}"
