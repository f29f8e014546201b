"""The options that commands share, declared once: those of the engine, and those of sampling.

A command takes the engine's as one dict, its parameter `options`, which `engine_options` spells out for typer. Names
and defaults are those of `config.Settings`: what is left out means the same in every command and in `tiermoe.load`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from tiermoe.config import DEFAULT_QUANTIZER, QUANTIZERS, Settings
from tiermoe.errors import ConfigError

Model = Annotated[
    str, typer.Argument(help="A model directory, a GGUF file or a Hugging Face hub id.", show_default=False)
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Replace a part or setting of the preset, like prefetch=none.", show_default=False),
]
StoreDir = Annotated[
    Path | None,
    typer.Option("--store", help="Folder of the expert store. Default: the user's cache folder.", show_default=False),
]
ENGINE: dict[str, Any] = {
    "memory": Annotated[
        str | None,
        typer.Option(
            help="Bound on the whole process, like 6GiB. Default: 80% of what the machine has free.",
            show_default=False,
        ),
    ],
    "device": Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")],
    "gpu_memory": Annotated[
        str | None,
        typer.Option(
            help="Bound on what is put on a GPU, like 6GiB. Default: what it has free, less a reserve.",
            show_default=False,
        ),
    ],
    "bits": Annotated[
        int | None,
        typer.Option(
            help="Precision of the experts: 16 (the checkpoint's own), 8, 4, 3 or 2 bits. Default: the preset's, "
            "else 4, and of what comes quantised its own.",
            show_default=False,
        ),
    ],
    "dense_bits": Annotated[
        int | None,
        typer.Option(
            help="Precision of the other linear layers: 16, 8 or 4 bits (4: the output layer at 6, on GPUs 8). "
            "Default: the preset's, else that of the experts, 4 where theirs is less.",
            show_default=False,
        ),
    ],
    "quantizer": Annotated[
        str | None,
        typer.Option(
            help=f"How 4 and 2 bits are made: {', '.join(QUANTIZERS)}. gptq and gptq-nonlinear lose least; tiermoe "
            "pack calibrates them on a text. 3 bits are always nonlinear, or gptq-nonlinear where a gptq is named. "
            f"Default: {DEFAULT_QUANTIZER}.",
            show_default=False,
        ),
    ],
    "cache": Annotated[
        str | None,
        typer.Option(
            help="Size of the expert cache alone, like 25% of the experts or 3MiB. Default: what --memory leaves.",
            show_default=False,
        ),
    ],
    "chunk": Annotated[int, typer.Option(help="Tokens of a prompt that run at once.")],
    "context": Annotated[
        int | None,
        typer.Option(help="Tokens, prompt and answer, to reserve key/value memory for.", show_default=False),
    ],
    "kv_bits": Annotated[
        int,
        typer.Option(
            help="Precision of keys and values in the cache: 16 bits (the checkpoint's own), or 8: half the memory; "
            "tokens can change."
        ),
    ],
    "decoder": Annotated[
        str,
        typer.Option(
            help="auto: tiermoe's own decoder where it has one for the family; generic: transformers' modelling code."
        ),
    ],
    "preset": Annotated[str, typer.Option(help="A named composition; `tiermoe presets` lists them.")],
    "set": Set,
    "lanes": Annotated[
        int | None,
        typer.Option(help="Threads that read experts. Default: the best of a short probe.", show_default=False),
    ],
    "threads": Annotated[int | None, typer.Option(help="Compute threads. Default: one per core.", show_default=False)],
    "store": StoreDir,
}
"""Setting → the option of that name."""

MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="0 always takes the likeliest token, higher samples more freely. "
        "Default: as the model's generation_config.json says, else 0 (run) or 0.7 (chat).",
        show_default=False,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the likeliest tokens that make up this probability. "
        "Default: as generation_config.json says, else 1 (run) or 0.95 (chat).",
        show_default=False,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        help="Sample from so many of the likeliest tokens, 0: from all. "
        "Default: as generation_config.json says, else 0.",
        show_default=False,
    ),
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.", show_default=False)]

Command = Callable[..., None]


def engine_options(only: Sequence[str] = (), without: Sequence[str] = ()) -> Callable[[Command], Command]:
    """Spells out a command's parameter `options`: the engine's options, `only` those, or all `without` those. The
    command gets a dict of what `config.settings` takes: every option but those that were left out and have no
    default."""
    assert ENGINE.keys() >= {*only, *without}
    names = [name for name in only or ENGINE if name not in without]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def expanded(**named: Any) -> None:
            bound = signature.bind(**named)
            bound.apply_defaults()
            values = bound.arguments
            options = {name: values.pop(_parameter(name)) for name in names}
            if "set" in options:
                options["set"] = changes(options["set"])
            command(**values, options=given(**options))

        hints = get_type_hints(command, include_extras=True)
        parameters = []
        for name, parameter in inspect.signature(command).parameters.items():
            if name == "options":
                parameters += [_option(each) for each in names]
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))
        signature = inspect.Signature(parameters)
        # what typer reads
        expanded.__signature__ = signature  # type: ignore[attr-defined]
        expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return expanded

    return decorate


def _option(name: str) -> inspect.Parameter:
    default = None if name == "set" else Settings.__dataclass_fields__[name].default
    return inspect.Parameter(_parameter(name), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=ENGINE[name])


def _parameter(name: str) -> str:
    """A setting's parameter: `set` is Python's own name."""
    return f"{name}_" if name == "set" else name


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
