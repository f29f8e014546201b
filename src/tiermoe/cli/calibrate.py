"""`tiermoe calibrate`: the profiles of the presets that need one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tiermoe.cli import options as opt
from tiermoe.cli.evaluate import read_text
from tiermoe.cli.output import note, progress_bar, starting
from tiermoe.cli.replicas import need_ray
from tiermoe.cli.terminal import Terminal
from tiermoe.cli.trace import Prompt, Sequence, TextFile, Tokens
from tiermoe.errors import ConfigError
from tiermoe.systems import PRESETS

if TYPE_CHECKING:
    from tiermoe.measure.make_profiles import Found

NEEDED = ("hobbit", "edgemoe", "fate", "corm")
"""Presets that cannot run without a calibration."""

NAMES = (*NEEDED, "mobile", "nimble")
"""Mobile has the paper's gamma, nimble values that were found on other models."""


@opt.engine_options(without=["cache", "chunk", "context", "kv_bits", "preset", "set"])
def calibrate(
    model: opt.Model,
    text: TextFile,
    options: dict[str, Any],
    for_: Annotated[str, typer.Option("--for", help="Presets to calibrate.")] = ",".join(NEEDED),
    tokens: Tokens = 2048,
    prompt: Prompt = 32,
    sequence: Sequence = 256,
    tolerated_loss: Annotated[
        str, typer.Option(help="Loss that edgemoe's bitwidths and mobile's gamma may cost, on text not searched on.")
    ] = "5%",
    fallback_ratio: Annotated[
        str | None,
        typer.Option(help="Find the gamma that lets so many tokens fall back, like 15%.", show_default=False),
    ] = None,
    metric: Annotated[str, typer.Option(help="What edgemoe's loss is of: perplexity or rouge2.")] = "perplexity",
    pairs: Annotated[
        Path | None,
        typer.Option(help='Documents for rouge2: {"document": ..., "summary": ...} a line.', show_default=False),
    ] = None,
    for_cache: Annotated[str, typer.Option(help="Expert cache that will run, for hobbit's weights.")] = "45%",
    bitwidth_quantizer: Annotated[
        str, typer.Option(help="How edgemoe's bitwidths are made: linear (the paper's) or hqq.")
    ] = "linear",
    usage_share: Annotated[
        str, typer.Option(help="Of a layer's experts, the least used ones that corm has in low precision.")
    ] = "30%",
    processes: Annotated[
        int | None,
        typer.Option(help="Processes that measure the importance of edgemoe's experts.", show_default=False, min=1),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Those processes are Ray's, of this machine or of RAY_ADDRESS's cluster.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Make anew what is calibrated already.")] = False,
) -> None:
    """Measure what presets need to know of a model, once, and keep it beside its store. Interrupted, it picks up where
    it stopped when run again."""
    names = parse_names(for_)
    loss = parse_percent("tolerated-loss", tolerated_loss)
    ratio = None if fallback_ratio is None else parse_percent("fallback-ratio", fallback_ratio)
    _check_processes(names, processes, ray)
    content = read_text(text)
    with starting():
        from tiermoe.process import footprint

        footprint.import_libraries(own_process=True)
        from tiermoe.measure.calibration import Asked, prepare
        from tiermoe.measure.make_profiles import Found, make_profiles
        from tiermoe.measure.sequences import Cut
        from tiermoe.measure.tasks import read_pairs

        asked = Asked(
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
        calibration = prepare(model, text.name, content, Cut(tokens, prompt, sequence), options, asked)
    with progress_bar() as progress:
        results = make_profiles(calibration, names, progress, force)
    found = [result for result in results if isinstance(result, Found)]
    failed = [result for result in results if not isinstance(result, Found)]
    if found:
        Terminal().print(_table(found))
        note(f"[kept in {calibration.store / 'profiles'}]")
    if len(failed) == 1:
        raise failed[0].error
    if failed:
        raise type(failed[0].error)("; ".join(f"{result.name}: {result.error}" for result in failed))


def _check_processes(names: list[str], processes: int | None, ray: bool) -> None:
    """ConfigError where `--processes` or `--ray` would do nothing, or Ray is not there."""
    for option, given in (("--ray", ray), ("--processes", processes is not None)):
        if given and "edgemoe" not in names:
            raise ConfigError(f"{option} measures edgemoe's experts, and --for names other presets; leave it out")
    if ray and processes is None:
        raise ConfigError("--ray runs the measuring processes; say how many with --processes")
    if ray:
        need_ray("--ray")


def parse_names(text: str) -> list[str]:
    """The presets of '--for'. ConfigError for one that needs no calibration, or is none."""
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


def _table(found: list[Found]) -> Table:
    table = Table(title="calibrated", title_justify="left")
    for column in ("preset", "setting", "found"):
        table.add_column(column)
    for result in found:
        for number, (name, value) in enumerate(result.facts.items()):
            label = f"{result.name} (made before)" if result.kept else result.name
            table.add_row("" if number else label, name, value)
        table.add_section()
    return table
