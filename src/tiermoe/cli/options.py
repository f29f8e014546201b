"""Options that several commands share, and how their values are read.

`ENGINE` has the options of an engine. A command takes them as one dict, its parameter `options`, which `engine_options`
spells out for typer. Names and defaults are those of `config.Settings`: an option that is left out means the same in
every command and in `tiermoe.load`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from tiermoe.config import DEFAULT_QUANTIZER, MIB, QUANTIZERS, Settings, format_size
from tiermoe.errors import ConfigError
from tiermoe.offload.plugins import VARIABLE, load_files

Model = Annotated[
    str,
    typer.Argument(
        help="A model directory, a GGUF file, a hub id, HUB-ID:FILE for one of its GGUF files, or stories-7m, the "
        "shipped model.",
        show_default=False,
    ),
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
            help="Bound on allocations on a GPU, like 6GiB. Default: the GPU's free memory, less a reserve.",
            show_default=False,
        ),
    ],
    "bits": Annotated[
        int | None,
        typer.Option(
            help="Precision of the experts: 16 (the checkpoint's own), 8, 4, 3 or 2 bits. Default: the preset's, "
            "else 4; for a checkpoint that is quantised already, its own.",
            show_default=False,
        ),
    ],
    "dense_bits": Annotated[
        int | None,
        typer.Option(
            help="Precision of the other linear layers: 16, 8 or 4 bits (4: the output layer at 6, on GPUs 8). "
            "Default: the preset's, else that of the experts, but at least 4; layers that come quantised stay as they "
            "are.",
            show_default=False,
        ),
    ],
    "quantizer": Annotated[
        str | None,
        typer.Option(
            help=f"Quantiser of 4 and 2 bits: {', '.join(QUANTIZERS)}. gptq and gptq-nonlinear lose least; tiermoe "
            "pack calibrates them on a text. 3 bits are always nonlinear, or gptq-nonlinear where a gptq is named. "
            "hqq-double is hqq with scales of 8 bits in 4-bit neurons that are read alone (corm), else hqq. "
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
    "chunk": Annotated[int, typer.Option(help="Prompt tokens that run in one step (chunked prefill).")],
    "context": Annotated[
        int | None,
        typer.Option(
            help="Tokens of prompt and answer for which KV cache is reserved. Default: as many as the prompt and "
            "--max-tokens need (run), else the model's own context, at most 4096.",
            show_default=False,
        ),
    ],
    "kv_bits": Annotated[
        int,
        typer.Option(
            help="Precision of the KV cache: 16 bits (the checkpoint's own), 8 (half the memory) or 4 (a quarter); "
            "with 8 and 4 tokens can change."
        ),
    ],
    "decoder": Annotated[
        str,
        typer.Option(
            help="auto: tiermoe's own decoder where it has one for the family; generic: transformers' modelling code."
        ),
    ],
    "preset": Annotated[str, typer.Option(help="A named composition of policies; `tiermoe presets` lists them.")],
    "set": Set,
    "lanes": Annotated[
        int | None,
        typer.Option(
            help="Experts that are read at once, from each drive. Default: learned while they are read, 1 to 16.",
            show_default=False,
        ),
    ],
    "threads": Annotated[int | None, typer.Option(help="Compute threads. Default: one per core.", show_default=False)],
    "also": Annotated[
        Path | None,
        typer.Option(
            help="Folder on another drive to which files of experts were copied, all or some, under their names (of a "
            "store, or the model's own where they run in place): both drives share the reads.",
            show_default=False,
        ),
    ],
    "store": StoreDir,
}
"""Setting → the option of that name."""

Plugin = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin", envvar=VARIABLE, metavar="FILE", show_default=False,
        help="Run a Python file of yours first, which adds policies and presets (docs/research.md); again for another.",
    ),
]  # fmt: skip

# --- the chat template and sampling: run, chat, serve ---

ChatTemplateFile = Annotated[
    Path | None,
    typer.Option(
        help="File with a chat template (Jinja) in place of the model's own. What it writes for tools and thoughts is "
        "what answers are read for.",
        show_default=False,
    ),
]

MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="Sampling temperature; 0 is greedy. Default: as generation_config.json says, else 0 (run), 0.7 (chat) or "
        "1 (serve).",
        show_default=False,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Nucleus sampling: the likeliest tokens that make up this probability. "
        "Default: as generation_config.json says, else 1 (run, serve) or 0.95 (chat).",
        show_default=False,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        help="Sample from the K likeliest tokens; 0: from all. Default: as generation_config.json says, else 0.",
        show_default=False,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Least probability of a token, as a share of the likeliest token's. Default: 0, any.", show_default=False
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        help="Penalty for tokens that prompt or answer have; 1 is none. Default: as generation_config.json says, "
        "else 1.",
        show_default=False,
    ),
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.", show_default=False)]

# --- speculation: run, chat, serve ---

Draft = Annotated[
    str,
    typer.Option(
        help="Where guesses at the next tokens come from, which are verified together where that saves time and change "
        "no token. lookup: what followed the same tokens earlier in prompt and answer; mtp: that, else the model's own "
        "MTP head, which has to be in the checkpoint; a model: a small one with the same tokenizer, in memory whole; "
        "none: no guesses."
    ),
]

Command = Callable[..., None]
_LARGEST_TEMPLATE = MIB


def engine_options(only: Sequence[str] = (), without: Sequence[str] = ()) -> Callable[[Command], Command]:
    """Decorator that spells out a command's parameter `options` as options of the engine. only: their names; empty:
    all. without: names to leave out. The command gets a dict for `config.settings`, without options that are None."""
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
        # typer reads these two
        expanded.__signature__ = signature  # type: ignore[attr-defined]
        expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return expanded

    return decorate


def with_plugins(command: Command) -> Command:
    """The command with an option `--plugin`: the files run before it does."""

    @functools.wraps(command)
    def expanded(plugin: list[Path] | None = None, **named: Any) -> None:
        load_files(plugin or ())
        command(**named)

    signature = inspect.signature(command)
    last = inspect.Parameter("plugin", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Plugin)
    hints = {**get_type_hints(command, include_extras=True), "plugin": Plugin}
    parameters = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[each.name])
        for each in (*signature.parameters.values(), last)
    ]
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads these two
    expanded.__annotations__ = hints
    return expanded


def _option(name: str) -> inspect.Parameter:
    default = None if name == "set" else Settings.__dataclass_fields__[name].default
    return inspect.Parameter(_parameter(name), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=ENGINE[name])


def _parameter(name: str) -> str:
    """Name of a setting's parameter: `set` is a builtin."""
    return f"{name}_" if name == "set" else name


def changes(set_: list[str] | None) -> dict[str, str] | None:
    """Name → value of the `--set` options; None without any. ConfigError for one that is not NAME=VALUE."""
    if not set_:
        return None
    pairs = [text.partition("=") for text in set_]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise ConfigError(f"--set {name}{equals}{value} is not NAME=VALUE; write it like --set prefetch=none")
    return {name.strip(): value.strip() for name, _, value in pairs}


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def read_text(path: Path) -> str:
    """The text of a file. ConfigError if it cannot be read, or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the text {path} cannot be read: {error.strerror}; name a text file with --text") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start:,}); convert it first") from error


def read_template(path: Path | None) -> str | None:
    """The chat template in a file; None without a file. ConfigError if it cannot be read or is none."""
    if path is None:
        return None
    from tiermoe.model.chat.jinja import check_template

    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST_TEMPLATE + 1)
    except OSError as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error.strerror}; name a Jinja file") from error
    if len(content) > _LARGEST_TEMPLATE:
        raise ConfigError(f"{path} is larger than {format_size(_LARGEST_TEMPLATE)}: no chat template is")
    try:
        text = content.decode()
        check_template(text)
    except ValueError as error:
        raise ConfigError(f"{path} is no chat template: {error}") from error
    return text
