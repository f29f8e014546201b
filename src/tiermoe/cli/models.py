"""Models on this machine: `tiermoe pull` downloads one from the hub, `list` shows them, `remove` removes a store, or a
download too."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tiermoe.cli import options as opt
from tiermoe.cli.output import note, plain, starting
from tiermoe.cli.terminal import WIDE, Terminal
from tiermoe.config import format_size, parse_size, settings
from tiermoe.errors import ConfigError, ModelError
from tiermoe.formats.store_files import CachedStore, cache_folder, cached_stores, removable, remove_store
from tiermoe.model.hf.local_models import CachedDownload, cached_downloads, remove_download


@opt.engine_options(only=["memory", "context"])
def pull(
    model: Annotated[
        str, typer.Argument(help="A hub id, or HUB-ID:FILE for one of its GGUF files.", show_default=False)
    ],
    options: dict[str, Any],
) -> None:
    """Download a model and print its path. Of a repository with GGUF files alone, the largest file is taken with all
    its experts within the memory budget; if no file fits, the smallest of at least 4 bits a weight. FILE is the name of
    a file, or its end, like Q4_K_M. An interrupted download is resumed."""
    with starting("asking the hub"):
        from tiermoe.engine.gguf_choice import choose
        from tiermoe.model.hf.hub import download, download_files, inspect_without_download, read_repository
        from tiermoe.model.hf.local_models import local_model, split_name

        asked, chosen, why = settings(**options), None, ""
        if found := local_model(model):
            note("it is on this machine already")
            print(found)
            return
        name, file = split_name(model)
        repository = read_repository(name)
        if not file and repository.gguf_models() and not repository.has_safetensors:
            chosen, why = choose(repository, asked)
        elif not file:
            inspect_without_download(name, None)  # says what is wrong with it first
    if chosen is None:
        print(download(model))
        return
    note(f"{chosen.name}, {format_size(chosen.nbytes)}: {why}")
    note(f"'tiermoe run {name}:{chosen.name}' runs it")
    print(download_files(repository, chosen.files) / chosen.files[0])


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


def remove(
    name: Annotated[
        str | None,
        typer.Argument(help="A model or a store's folder, as `tiermoe list` names it.", show_default=False),
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Remove the hub's files of the model too.")] = False,
    down_to: Annotated[
        str | None,
        typer.Option(
            help="In place of a name: stores leave, the one that was not used for longest first, until the others take "
            "at most this, like 50GiB. Stores in use stay.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would leave, and remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing.")] = False,
) -> None:
    """Remove a model's store from the user's cache folder, after a question. A store that a process packs into or runs
    from is not removed, nor is anything outside of the cache folders."""
    if (name is None) == (down_to is None):
        raise ConfigError("name one model, as 'tiermoe list' shows it, or give --down-to SIZE")
    known, downloaded = cached_stores(), cached_downloads()
    stores = _named(name, known, downloaded, download) if name is not None else _least_used(known, str(down_to))
    downloads = [each for each in downloaded if download and (each.name == name or _among(stores, each))]
    stores += [store for store in known if store not in stores and any(_lies_in(store, each) for each in downloads)]
    leaving: list[CachedStore | CachedDownload] = [*stores, *downloads]
    if not leaving:
        note(f"nothing to remove: the stores take {format_size(sum(store.nbytes for store in known))}")
        return
    for each in leaving:
        note(_line(each))
    total = format_size(sum(each.nbytes for each in leaving))
    if dry_run:
        note(f"{total} would come back; nothing is removed")
        return
    if not yes and not _agreed(f"remove {'these' if len(leaving) > 1 else 'this'}? {total} come back"):
        note("nothing is removed")
        return
    for each in leaving:
        if isinstance(each, CachedStore):
            remove_store(each)
        else:
            remove_download(each)
        note(f"removed {each.name}: {format_size(each.nbytes)} are free again")


def _named(
    name: str, known: Sequence[CachedStore], downloaded: Sequence[CachedDownload], download: bool
) -> list[CachedStore]:
    """The store of a name; none if the name is a download's alone. ConfigError if it is nothing's, or several
    stores'."""
    found = [store for store in known if store.root.name == name] or [each for each in known if each.answers_to(name)]
    if len(found) > 1:
        folders = ", ".join(plain(store.root.name) for store in found)
        raise ConfigError(f"'{name}' names {len(found)} stores; name the folder of one: {folders}")
    own = [each for each in downloaded if each.name == name]
    if not found and not own:
        raise ConfigError(f"there is neither a store nor a download '{name}'; 'tiermoe list' has the names")
    if not found and not download:
        raise ModelError(
            f"'{name}' has no store; its download takes {format_size(own[0].nbytes)}: --download removes it"
        )
    return found


def _least_used(known: Sequence[CachedStore], down_to: str) -> list[CachedStore]:
    """The stores that leave so that the others take at most `down_to`; a line says where those that cannot leave take
    more. known: the one that was used last first."""
    bound, total, leaving = parse_size(down_to, "--down-to"), sum(store.nbytes for store in known), []
    for store in reversed(known):
        if total <= bound:
            break
        if removable(store):
            total -= store.nbytes
            leaving.append(store)
    if total > bound:
        note(f"{format_size(total)} stay, more than {down_to}: running processes use them, or they are links")
    return leaving


def _among(stores: Sequence[CachedStore], download: CachedDownload) -> bool:
    """Whether one of the stores is of this download."""
    return any(store.answers_to(download.name) or _lies_in(store, download) for store in stores)


def _lies_in(store: CachedStore, download: CachedDownload) -> bool:
    """Whether a store is of a file in the hub's cache that was named by its path, as GGUF files are."""
    return Path(store.name).is_relative_to(download.root)


def _line(each: CachedStore | CachedDownload) -> str:
    if isinstance(each, CachedDownload):
        return f"{each.name}, downloaded: {format_size(each.nbytes)} in {each.root}"
    profiles = f", with {each.profiles} calibration profiles" if each.profiles else ""
    return f"{each.name}, packed: {format_size(each.nbytes)} in {each.root}{profiles}"


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("nobody can be asked here: standard input is no terminal; --yes removes without a question")
    return typer.confirm(question, err=True)
