"""`tiermoe plan`: how a memory budget is divided and which speed to expect, before anything is downloaded or loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tiermoe.cli import options as opt
from tiermoe.cli.output import note, starting
from tiermoe.cli.session import MTP, beyond_this_machine
from tiermoe.cli.terminal import Terminal
from tiermoe.config import Settings, format_size
from tiermoe.config import settings as make_settings
from tiermoe.errors import ConfigError
from tiermoe.offload.computers import Rates, named_rates, with_drive

if TYPE_CHECKING:
    from tiermoe.cli.preview import Packing, Preview
    from tiermoe.engine.expectation import Expectation, OtherBudget, Range
    from tiermoe.formats.expert_format import ExpertFormat

Machine = Annotated[
    str | None,
    typer.Option(
        help="Speed on another machine, like macbook-air-m2 or laptop-ddr5, or on this one with another drive: nvme, "
        "sata, sdcard. An unknown name lists all. Default: this machine, measured once.",
        show_default=False,
    ),
]


@opt.engine_options(without=["threads"])
def plan(
    model: opt.Model,
    options: dict[str, Any],
    machine: Machine = None,
    draft: Annotated[
        str | None,
        typer.Option(help="mtp: plan with the model's own MTP head, as `run --draft mtp` does.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Show how a memory budget would be divided, and the speed to expect. Nothing is loaded or packed, and of a model
    on the hub only the config and the headers are read."""
    if draft not in (None, MTP):
        raise ConfigError(
            f"plan has --draft mtp alone, not --draft {draft}: looking up takes no memory, and `tiermoe plan` of a "
            f"draft model says what that takes"
        )
    named = _rates_of_named(machine, options)
    with starting("reading headers and measuring this machine"):
        from tiermoe.cli.preview import preview

        settings = make_settings(**options)
        here, learns = named is None, machine is None
        found = preview(model, settings, _rates(settings, machine, named), here, learns, head=draft == MTP)
    if as_json:
        print(json.dumps(_document(found)))
        return
    _print_plan(found)
    beyond = beyond_this_machine(settings) if named is None else ()
    for warning in (*beyond, *found.plan.warnings):
        note(f"note: {warning}")


def _rates_of_named(machine: str | None, options: dict[str, Any]) -> Rates | None:
    """The rates of a computer by name; None for this one. ConfigError for an unknown name, beside --also, or without
    --memory: how much is free there is not known."""
    rates = None if machine is None else named_rates(machine)
    if machine is not None and options.get("also") is not None:
        raise ConfigError(f"--also is a drive of this machine, --machine {machine} another one; leave out one of them")
    if rates is not None and options.get("memory") is None:
        raise ConfigError(f"how much memory may the model take on {machine}? give --memory beside --machine")
    return rates


def _rates(settings: Settings, machine: str | None, named: Rates | None) -> Callable[[ExpertFormat | None], Rates]:
    def rates(by_torch: ExpertFormat | None) -> Rates:
        if named is not None:
            return named
        from tiermoe.engine.machine_rates import machine_rates, torch_seconds, with_second_drive
        from tiermoe.formats.store_files import cache_folder

        here = machine_rates(cache_folder(), settings.threads)
        if settings.also is not None:
            here = with_second_drive(here, settings.also)
        if by_torch is not None:
            here = replace(here, torch_s=torch_seconds(by_torch))
        return here if machine is None else with_drive(here, machine)

    return rates


def _document(found: Preview) -> dict[str, Any]:
    """The object that `--json` prints."""
    plan = found.plan
    return {
        **asdict(plan),
        **plan.parts(),
        "total": plan.total,
        "peak": plan.peak,
        "kernels": found.backend.kernels,
        "decoder": found.backend.decoder,
        "download": found.download and asdict(found.download),
        "to_pack_bytes": found.packing.experts + found.packing.dense if found.packing else 0,
        "to_pack_seconds": found.packing and found.packing.seconds and asdict(found.packing.seconds),
        "expectation": found.expectation and asdict(found.expectation),
        "no_expectation": found.unknown,
        "found": found.found and asdict(found.found),
        "other_budgets": [asdict(each) for each in found.other_budgets],
    }


def _print_plan(found: Preview) -> None:
    result, console = found.plan, Terminal()
    table = Table(
        title=f"{format_size(result.budget)} ({result.budget_source}), {result.precision}",
        title_justify="left",
    )
    table.add_column("what")
    table.add_column("bytes", justify="right")
    table.add_column("note")
    for what, nbytes, remark in result.rows():
        table.add_row(what, format_size(nbytes), remark)
    table.add_section()
    for what, nbytes, remark in result.phases():
        table.add_row(what, format_size(nbytes), remark)
    table.add_row("in all", format_size(result.total), f"one token uses {result.token_slots} experts")
    console.print(table)
    lines = Table.grid(padding=(0, 2, 0, 0))
    for label, text in _lines(found):
        lines.add_row(label, text)
    console.print(lines)


def _lines(found: Preview) -> Iterator[tuple[str, str]]:
    """(label, text) of the lines below the table."""
    if found.download is not None:
        files = f"{found.download.files} files" if found.download.files > 1 else "1 file"
        yield "download:", f"{format_size(found.download.nbytes)} in {files}; none is here yet"
    if found.packing is not None:
        yield "packing:", _packing(found.packing)
    yield "decoder:", found.backend.decoder
    yield "CPU kernels:", found.backend.kernels
    chunks, lent = found.plan.prompt_chunks, found.plan.lent(found.plan.prompt_chunks, large=True)
    if chunks > 1 or lent:
        text = f"{chunks} chunks read each expert once, layer by layer, and" if chunks > 1 else "its chunks"
        text = f"{text} take the memory of {lent} slots meanwhile" if lent else text.removesuffix(", and")
        yield "a long prompt:", text
    if found.expectation is None:
        yield "expect:", f"not known: {found.unknown}"
    else:
        yield from _expected(found.expectation, found.plan.dense_bits)
    if found.found is not None:
        if found.expectation is None or not found.expectation.measured:
            yield "the last run says:", _measured(found.found)
        more = [each for each in found.other_budgets if each.slots > found.found.slots]
        shown = [more[len(more) // 2], more[-1]] if len(more) > 1 else more
        for label, each in zip(("with more memory:", ""), shown, strict=False):
            yield label, f"{format_size(each.memory_bytes)}: {_measured(each)}"


def _packing(packing: Packing) -> str:
    parts = ((packing.experts, "experts"), (packing.dense, "other layers"))
    sizes = " and ".join(f"{format_size(nbytes)} of {what}" for nbytes, what in parts if nbytes)
    text = f"writes {sizes} to {packing.folder}, once" if sizes else "takes the experts' checksums, once"
    if packing.experts + packing.dense > packing.free:
        text += f", where only {format_size(packing.free)} are free"
    if packing.seconds is not None:
        text += f"; about {_duration(packing.seconds)}"
    if packing.before:
        text += f"; '{packing.before}' calibrates and packs, before a run"
    return text


def _duration(seconds: Range) -> str:
    unit, name = (3600, "hours") if seconds.low >= 7200 else (60, "minutes") if seconds.low >= 120 else (1, "s")
    return f"{_number(seconds.low / unit)} to {_number(seconds.high / unit)} {name}"


def _measured(found: OtherBudget) -> str:
    return f"{_number(found.decode_tok_s)} tokens a second, {found.hit_rate:.0%} of a token's experts in the cache"


def _expected(expected: Expectation, dense_bits: str) -> Iterator[tuple[str, str]]:
    rates, drive = expected.rates, expected.drive_bytes
    yield (
        "expect:",
        f"{_range(expected.decode_tok_s)} tokens a second; first token {_range(expected.first_token_s)} s after a "
        f"prompt of {expected.prompt} tokens, once loaded",
    )
    hits, read = _range(expected.hit_rate, "{:.0%}".format), _range(drive, format_size)
    missed = f"; {hits} of its experts are in the cache, the drive reads {read}"
    yield "a token:", f"reads {format_size(expected.memory_bytes)} of memory{missed if drive.high else ''}"
    if dense_bits == "16" and expected.dense_bytes > expected.memory_bytes / 2:
        size = format_size(expected.dense_bytes)
        yield "dense weights:", f"{size} of that, at 16 bits; --dense-bits 4 packs them once and reads less than half"
    yield (
        "machine:",
        f"memory {rates.memory / 1e9:.3g} GB/s, drive {rates.drive / 1e9:.2g} GB/s, products "
        f"{rates.arithmetic / 1e9:.3g} GFLOP/s: {rates.source}",
    )
    yield "assumed:", expected.assumptions


def _number(value: float) -> str:
    """Two digits: an estimate has no more."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _range(numbers: Range, form: Callable[[float], str] = _number) -> str:
    low, high = form(numbers.low), form(numbers.high)
    return low if low == high else f"{low} to {high}"
