"""`tiermoe pull`: a model from the hub, downloaded now."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tiermoe.cli import options as opt
from tiermoe.cli.output import note, starting
from tiermoe.config import format_size, settings


@opt.engine_options(only=["memory", "context"])
def pull(
    model: Annotated[
        str, typer.Argument(help="A hub id, or HUB-ID:FILE for one of its GGUF files.", show_default=False)
    ],
    options: dict[str, Any],
) -> None:
    """Download a model, and print where it lies. Of a repository with GGUF files alone, the largest one is taken whose
    experts the memory budget holds all; where it holds no one's, the smallest one of at least 4 bits a weight. FILE is
    a file's name, or the end of it, like Q4_K_M. What is interrupted goes on where it stopped."""
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
