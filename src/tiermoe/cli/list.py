"""`tiermoe list`: models on this machine, downloaded and packed."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from tiermoe.cli.output import note
from tiermoe.cli.terminal import WIDE, Terminal
from tiermoe.config import format_size
from tiermoe.formats.stores import CachedStore, cache_folder, cached_stores
from tiermoe.model.hf.local_models import CachedDownload, cached_downloads


def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """List the models in the hub's cache and the stores in the user's cache folder: name, precisions, size, last use.
    Stores in folders of --store are not known."""
    downloads, stores = cached_downloads(), cached_stores()
    if as_json:
        print(json.dumps({"downloads": list(map(_facts, downloads)), "stores": list(map(_facts, stores))}))
        return
    if not downloads and not stores:
        note(f"nothing is downloaded, and nothing is packed in {cache_folder()}; 'tiermoe pull ORG/MODEL' downloads")
        return
    table = Table()
    for column in ("name", "what", "precisions"):
        table.add_column(column)
    table.add_column("size", justify="right")
    table.add_column("last used")
    for download in downloads:
        table.add_row(download.name, "downloaded", _files(download), *_size_and_use(download))
    for store in stores:
        table.add_row(store.name, "packed", _precisions(store), *_size_and_use(store))
    Terminal(piped=WIDE).print(table)
    total = sum(each.nbytes for each in downloads) + sum(each.nbytes for each in stores)
    note(f"{format_size(total)} in all; 'tiermoe remove NAME' gives them back")


def _facts(each: CachedDownload | CachedStore) -> dict[str, Any]:
    used = datetime.fromtimestamp(each.used).astimezone().isoformat(timespec="seconds")
    return {**asdict(each), "root": str(each.root), "used": used}


def _size_and_use(each: CachedDownload | CachedStore) -> tuple[str, str]:
    return format_size(each.nbytes), f"{datetime.fromtimestamp(each.used):%Y-%m-%d %H:%M}"


def _files(download: CachedDownload) -> str:
    """Of a GGUF file the name, which has its precision; safetensors are the checkpoint itself."""
    named = [name for name in download.weights if name.endswith(".gguf")]
    return ", ".join(named) or ("as published" if download.weights else "no weights")


def _precisions(store: CachedStore) -> str:
    if store.problem:
        return f"damaged: {store.problem}"
    dense = [f"dense layers {key}" for key in store.dense]
    return ", ".join([*store.precisions, *dense]) or "as published"
