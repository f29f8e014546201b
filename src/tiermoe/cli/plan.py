"""`tiermoe plan`: what would go where, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tiermoe.cli import options as opt
from tiermoe.cli.output import note, waiting
from tiermoe.config import format_size


@opt.engine_options(without=["threads"])
def plan(
    model: opt.Model,
    options: dict[str, Any],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Show how a memory budget would be used, without loading or packing anything."""
    with waiting("reading the checkpoint's headers"):
        from tiermoe.process import footprint

        footprint.import_libraries(own_process=True)
        from tiermoe.engine.load import plan as plan_model
        from tiermoe.kernels import cpu_kernels

        result = plan_model(model, **options)
    if as_json:
        more = {"total": result.total, "peak": result.peak, "kernels": cpu_kernels()}
        print(json.dumps(asdict(result) | result.parts() | more))
        return
    table = Table(
        title=f"{format_size(result.budget)} ({result.budget_source}), {result.precision}",
        title_justify="left",
        caption=f"CPU kernels: {cpu_kernels()}",
        caption_justify="left",
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
    Console().print(table)
    for warning in result.warnings:
        note(f"note: {warning}")
