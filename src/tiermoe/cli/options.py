"""Options that several commands share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tiermoe.errors import ConfigError

Model = Annotated[str, typer.Argument(help="A model directory or a Hugging Face hub id.", show_default=False)]
Memory = Annotated[
    str | None,
    typer.Option(
        help="Bound on the whole process, like 6GiB. Default: 80% of what the machine has free.",
        show_default=False,
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")]
GpuMemory = Annotated[
    str | None,
    typer.Option(
        help="Bound on what is put on a GPU, like 6GiB. Default: what it has free, less a reserve.",
        show_default=False,
    ),
]
Bits = Annotated[int, typer.Option(help="Precision of the experts: 16 (the checkpoint's own), 8, 4 or 2 bits.")]
DenseBits = Annotated[int, typer.Option(help="Precision of the other linear layers: 16, 8 or 4 bits.")]
Quantizer = Annotated[str, typer.Option(help="How 4 and 2 bits are made: hqq or linear.")]
Cache = Annotated[
    str | None,
    typer.Option(
        help="Size of the expert cache alone, like 25% of the experts or 3MiB. Default: what --memory leaves.",
        show_default=False,
    ),
]
Chunk = Annotated[int, typer.Option(help="Tokens of a prompt that run at once.")]
Context = Annotated[
    int | None,
    typer.Option(help="Tokens, prompt and answer, to reserve key/value memory for.", show_default=False),
]
Lanes = Annotated[
    int | None,
    typer.Option(help="Threads that read experts. Default: the best of a short probe.", show_default=False),
]
Threads = Annotated[int | None, typer.Option(help="Compute threads. Default: one per core.", show_default=False)]
Preset = Annotated[str, typer.Option(help="A named composition; `tiermoe presets` lists them.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Replace a part or setting of the preset, like prefetch=none.", show_default=False),
]
StoreDir = Annotated[
    Path | None,
    typer.Option("--store", help="Folder of the expert store. Default: the user's cache folder.", show_default=False),
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token; higher samples more freely.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens that make up this probability.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.", show_default=False)]


def changes(set_: list[str] | None) -> dict[str, str] | None:
    """What the `--set` options replace; None where there is none. ConfigError for one that is not NAME=VALUE."""
    if not set_:
        return None
    pairs = [text.partition("=") for text in set_]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise ConfigError(f"--set {name}{equals}{value} is not NAME=VALUE; write it like --set prefetch=none")
    return {name.strip(): value.strip() for name, _, value in pairs}


def given(**options: Any) -> dict[str, Any]:
    """The options that were given: those that are not None."""
    return {name: value for name, value in options.items() if value is not None}
