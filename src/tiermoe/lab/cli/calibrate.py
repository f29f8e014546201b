"""`tiermoe calibrate`: calibration profiles of presets, kept beside the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tiermoe.cli import options as opt
from tiermoe.cli.output import note, progress_bar, starting
from tiermoe.cli.terminal import Terminal
from tiermoe.errors import ConfigError
from tiermoe.lab.cli import options as lab
from tiermoe.lab.measure.pairs import read_pairs
from tiermoe.offload.presets import PRESETS
from tiermoe.platform.machine import require_extra

if TYPE_CHECKING:
    from tiermoe.lab.measure.calibrate import MadeProfile

NEEDED = ("hobbit", "edgemoe", "fate", "corm")
"""The papers' presets that cannot run without a calibration."""

NAMES = (*NEEDED, "mobile", "nimble", "adapmoe", "fiddler")
"""Presets that can be calibrated. Without it adapmoe and fiddler cannot run, mobile has the paper's gamma and nimble
values found on other models."""


@opt.engine_options(without=["cache", "chunk", "context", "kv_bits", "preset", "set", "also"])
def calibrate(
    model: opt.Model,
    text: lab.RecordedText,
    options: dict[str, Any],
    for_: Annotated[str, typer.Option("--for", help="Presets to calibrate.")] = ",".join(NEEDED),
    tokens: lab.RecordedTokens = 2048,
    prompt: lab.SequencePrompt = 32,
    sequence: lab.SequenceLength = 256,
    tolerated_loss: Annotated[
        str, typer.Option(help="Maximum loss increase on held-out text, for edgemoe's bitwidths and mobile's gamma.")
    ] = "5%",
    fallback_ratio: Annotated[
        str | None,
        typer.Option(
            help="Find mobile's gamma at which this share of tokens falls back, like 15%.", show_default=False
        ),
    ] = None,
    metric: Annotated[str, typer.Option(help="Metric of edgemoe's loss: perplexity or rouge2.")] = "perplexity",
    pairs: Annotated[
        Path | None,
        typer.Option(help='Documents for rouge2: {"document": ..., "summary": ...} a line.', show_default=False),
    ] = None,
    for_cache: Annotated[str, typer.Option(help="Expert cache that hobbit's weights are tuned for.")] = "45%",
    bitwidth_quantizer: Annotated[
        str, typer.Option(help="Quantiser of edgemoe's bitwidths: linear (the paper's) or hqq.")
    ] = "linear",
    usage_share: Annotated[
        str, typer.Option(help="Share of a layer's experts, the least used, that corm keeps in low precision.")
    ] = "30%",
    processes: Annotated[
        int | None,
        typer.Option(help="Processes that measure the importance of experts for edgemoe.", show_default=False, min=1),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run them on Ray: on this machine, or on RAY_ADDRESS's cluster.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Calibrate again what is calibrated already.")] = False,
) -> None:
    """Measure what presets need to know of a model, once, and keep it beside its store. After an interruption the next
    run resumes."""
    names = parse_names(for_)
    loss = parse_percent("tolerated-loss", tolerated_loss)
    ratio = None if fallback_ratio is None else parse_percent("fallback-ratio", fallback_ratio)
    _check_processes(names, processes, ray)
    content = opt.read_text(text)
    with starting():
        from tiermoe.lab.measure.calibrate import CalibrationOptions, MadeProfile, make_profiles, prepare
        from tiermoe.lab.measure.texts import SequenceShape

        asked = CalibrationOptions(
            loss,
            ratio,
            metric,
            tuple(read_pairs(pairs)) if pairs else (),
            bitwidth_quantizer,
            processes,
            ray,
            for_cache,
            parse_percent("usage-share", usage_share),
        )
        calibration = prepare(model, text.name, content, SequenceShape(tokens, prompt, sequence), options, asked)
    with progress_bar() as progress:
        results = make_profiles(calibration, names, progress, force)
    found = [result for result in results if isinstance(result, MadeProfile)]
    failed = [result for result in results if not isinstance(result, MadeProfile)]
    if found:
        Terminal().print(_table(found))
        note(f"[kept in {calibration.store / 'profiles'}]")
    if len(failed) == 1:
        raise failed[0].error
    if failed:
        raise type(failed[0].error)("; ".join(f"{result.name}: {result.error}" for result in failed))


def _check_processes(names: list[str], processes: int | None, ray: bool) -> None:
    """ConfigError where `--processes` or `--ray` would have no effect, or Ray is not installed."""
    for option, given in (("--ray", ray), ("--processes", processes is not None)):
        if given and "edgemoe" not in names:
            raise ConfigError(f"{option} measures edgemoe's experts, and --for names other presets; leave it out")
    if ray and processes is None:
        raise ConfigError("--ray runs the measuring processes; say how many with --processes")
    if ray:
        require_extra("--ray", "ray", "ray.serve")


def parse_names(text: str) -> list[str]:
    """The presets of `--for`. ConfigError for a name that needs no calibration, or is no preset."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in NAMES:
            why = "needs no calibration of its own" if name in PRESETS else "is no preset"
            raise ConfigError(f"'{name}' {why}; --for takes {', '.join(NAMES)}")
    return list(dict.fromkeys(names))


def parse_percent(name: str, text: str) -> float:
    """A share written as 5% or 0.05. ConfigError, naming the option, for anything else."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ConfigError(f"{name} {text!r} is not a share; write it like 5%") from None


def _table(found: list[MadeProfile]) -> Table:
    table = Table(title="calibrated", title_justify="left")
    for column in ("preset", "setting", "found"):
        table.add_column(column)
    for result in found:
        for number, (name, value) in enumerate(result.facts.items()):
            label = f"{result.name} (made before)" if result.kept else result.name
            table.add_row("" if number else label, name, value)
        table.add_section()
    return table
