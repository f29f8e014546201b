"""`tiermoe show`: facts of a model or of a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tiermoe.cli import options as opt
from tiermoe.cli.output import note, progress_bar, starting
from tiermoe.cli.terminal import Terminal
from tiermoe.config import format_size
from tiermoe.errors import StoreError

_ERROR = (
    "error: how far weights are from the checkpoint's, of their size. At 8, 4, 3 and 2 bits "
    "the shipped model's perplexity is 0.05, 0.6, 2 and 17% higher (docs/results.md)"
)


def show(
    model: Annotated[
        str, typer.Argument(help="A model directory, a hub id, or the folder of a store.", show_default=False)
    ],
    store: opt.StoreDir = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read every packed expert and verify its checksum.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show family, layers, experts, bytes, precisions and origin."""
    with starting("reading"):
        from tiermoe.cli.describe import describe_model, describe_store
        from tiermoe.model.prepare_store import is_store

        path = Path(model)
        facts = describe_store(path) if is_store(path) else describe_model(model, store)
    if as_json and not verify:
        print(json.dumps(facts))
    elif not as_json:
        _print(facts)
    if verify:
        _verify(facts, as_json)


def _print(facts: dict[str, Any]) -> None:
    console = Terminal()
    table = Table(show_header=False, title=facts["name"], title_justify="left")
    for key, value in facts.items():
        if key not in ("name", "precisions"):
            text = format_size(value) if key.endswith("_bytes") else str(value)
            table.add_row(key.removesuffix("_bytes").replace("_", " "), text)
    console.print(table)
    if facts["precisions"]:
        packed = Table(title="packed", title_justify="left", caption=_ERROR, caption_justify="left")
        for column in ("precision", "bytes", "an expert", "error mean / most", "encodings"):
            packed.add_column(column)
        for entry in facts["precisions"]:
            packed.add_row(
                entry["precision"],
                format_size(entry["bytes"]) + (" (in the checkpoint)" if entry["in_place"] else ""),
                format_size(entry["expert_bytes"]),
                f"{entry['mean_error']:.2%} / {entry['max_error']:.2%}",
                ", ".join(entry["encodings"]) or "as in the checkpoint",
            )
        console.print(packed)


def _verify(facts: dict[str, Any], as_json: bool) -> None:
    from tiermoe.cli.describe import verify_store

    if not facts["store"]:
        raise StoreError("there is no store to verify; 'tiermoe pack MODEL' makes one")
    with progress_bar() as progress:
        checked, damaged = verify_store(
            Path(facts["store"]), lambda done, total: progress("checking experts", done, total)
        )
    if as_json:
        print(json.dumps({**facts, "checked": checked, "damaged": damaged}))
    for problem in damaged:
        note(problem)
    if damaged:
        raise StoreError(
            f"{len(damaged)} of {checked} extents are damaged; pack the model again with 'tiermoe pack MODEL --force'"
        )
    note(f"all {checked} checksums match")
