"""`tiermoe presets`: the named compositions of policies, their parts and settings."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from tiermoe.cli.terminal import Terminal
from tiermoe.offload.composition import Composition, declarations
from tiermoe.offload.presets import all_presets, first_steps, preset_named


def presets(
    name: Annotated[str | None, typer.Argument(help="A preset to show in full.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the presets, or show one: its parts and settings, and whether it is exact or lossy."""
    chosen = [preset_named(each) for each in ([name] if name else all_presets())]
    if as_json:
        print(json.dumps([_described(preset) for preset in chosen]))
    elif name:
        _show(chosen[0])
    else:
        _list(chosen)


def _described(preset: Composition) -> dict[str, Any]:
    return {
        "preset": preset.name, "summary": preset.summary, "source": preset.source, "lossy": preset.lossy,
        "needs_calibration": preset.profile if preset.needs_profile else "", "first_steps": first_steps(preset),
        **preset.settings(),
    }  # fmt: skip


def _list(chosen: list[Composition]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("preset", "what it does", "tokens", "before the first run"):
        table.add_column(column, no_wrap=column == "preset")
    for preset in chosen:
        tokens, steps = "lossy" if preset.lossy else "exact", first_steps(preset)
        table.add_row(preset.name, preset.summary, tokens, "\n".join(steps) or "-")
    Terminal().print(table)


def _show(preset: Composition) -> None:
    print(f"{preset.name}: {preset.summary}")
    if preset.source:
        print(f"source: {preset.source}")
    print(f"tokens: {', '.join(preset.lossy) + ' can change them' if preset.lossy else 'exact'}")
    for step in first_steps(preset):
        print(f"before the first run: {step}")
    table = Table(box=None, pad_edge=False)
    for column in ("part or setting (--set NAME=VALUE)", "value", "can be"):
        table.add_column(column)
    known, missing = declarations(), preset.missing()
    for part, value in preset.settings().items():
        shown = "from the calibration" if part in missing else "-" if value is None else str(value).lower()
        table.add_row(part, shown, ", ".join(map(str, known[part].setting.one_of)))
    Terminal().print(table)
