"""Entry point of the `tiermoe` command: subcommands that are imported when they run, errors in one line."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from tiermoe import __version__
from tiermoe.cli.output import TRACEBACK, cause, ends_at_once, one_line
from tiermoe.platform.built import instruction_sets

_ANSWER, _MODELS, _MEASURE, _STUDY = "Answer", "Models and this machine", "Speed and quality", "Routing and papers"
COMMANDS = {
    "run": ("tiermoe.cli.run:run", "Answer one prompt. The first run of a model packs its experts.", _ANSWER),
    "chat": ("tiermoe.cli.chat:chat", "Chat with a model in the terminal.", _ANSWER),
    "serve": ("tiermoe.cli.serve:serve", "Serve a model to OpenAI's, Anthropic's and Ollama's clients.", _ANSWER),
    "pull": (
        "tiermoe.cli.models:pull",
        "Download a model, or the GGUF file of a repository that fits the budget.",
        _MODELS,
    ),
    "pack": ("tiermoe.cli.pack:pack", "Pack a model's experts into a store before the first run.", _MODELS),
    "list": ("tiermoe.cli.models:list_models", "List the models on this machine: downloaded, and packed.", _MODELS),
    "remove": ("tiermoe.cli.models:remove", "Remove a model's store, or its download too, from this machine.", _MODELS),
    "show": ("tiermoe.cli.show:show", "Show layers, experts and precisions of a model or a store.", _MODELS),
    "plan": ("tiermoe.cli.plan:plan", "Show how a memory budget is divided, and the speed to expect.", _MODELS),
    "doctor": (
        "tiermoe.cli.doctor:doctor",
        "Show what this machine has and lacks, and what would be faster; --exact compares bits.",
        _MODELS,
    ),
    "bench": ("tiermoe.lab.cli.bench:bench", "Measure speed beside llama.cpp, transformers and accelerate.", _MEASURE),
    "eval": (
        "tiermoe.lab.cli.evaluate:evaluate",
        "Measure perplexity and KL divergence of a preset on a text.",
        _MEASURE,
    ),
    "compare": (
        "tiermoe.lab.cli.compare:compare",
        "Compare presets on one text: speed, bytes read, quality.",
        _MEASURE,
    ),
    "calibrate": (
        "tiermoe.lab.cli.calibrate:calibrate",
        "Measure on a text what a preset needs to know of a model.",
        _MEASURE,
    ),
    "presets": ("tiermoe.cli.presets:presets", "List the presets, or show the parts and settings of one.", _MEASURE),
    "trace": ("tiermoe.lab.cli.trace:trace", "Record a routing trace: which experts a text uses.", _STUDY),
    "simulate": ("tiermoe.lab.cli.simulate:simulate", "Replay a routing trace on a simulated machine.", _STUDY),
    "paper": (
        "tiermoe.lab.cli.paper:paper",
        "Make the figures of one of the five papers, its values beside yours.",
        _STUDY,
    ),
}
"""Command → (module:function, its line in the list of commands, its group there), in the order of that list."""

_TAKE_PLUGINS = {
    "run", "chat", "serve", "plan", "bench", "eval", "compare", "calibrate", "presets", "trace", "simulate",
}  # fmt: skip
"""Commands that take presets or measure for them."""


class LazyCommands(TyperGroup):
    """Group of commands whose modules are imported when a command or its help is invoked: `--version` and `--help`
    import none of them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: TyperCommand(name, help=line, rich_help_panel=group) for name, (_, line, group) in COMMANDS.items()
        }

    def get_params(self, ctx: Any) -> list[Any]:
        flags = super().get_params(ctx)
        for flag in flags:
            flag.default = False  # typer imports pydantic to check a flag that is None
        return flags

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in COMMANDS:
            module, _, function = COMMANDS[args[0]][0].partition(":")
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            with ends_at_once():
                command = getattr(importlib.import_module(module), function)
            if args[0] in _TAKE_PLUGINS:
                from tiermoe.cli.options import with_plugins

                command = with_plugins(command)
            alone.command(args[0])(command)
            self.add_command(typer.main.get_command(alone))
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="tiermoe",
    cls=LazyCommands,
    help="Run Mixture-of-Experts language models larger than the memory they run in, exactly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(named: bool) -> None:
    if named:
        kernels = ", ".join(instruction_sets()) or "none, torch computes, slowly"
        print(f"tiermoe {__version__} (kernels: {kernels})")
        raise typer.Exit


@app.callback(epilog=f"{TRACEBACK}=1 in the environment shows the traceback of an unexpected error.")
def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version, and the kernels that run here.", callback=_version, is_eager=True
    ),
) -> None:
    """Run Mixture-of-Experts language models larger than the memory they run in, exactly."""


# typer carries its own copy of click: the base class of that copy's errors, and the error that is raised after help
_ClickError: type[Exception] = typer.BadParameter.__mro__[2]
_HelpShown: type[Exception] = sys.modules[typer.BadParameter.__module__].NoArgsIsHelpError


def main() -> None:
    """Runs the command line. Errors are one line on standard error and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        # nobody reads our output any more: print nothing, also not while the interpreter shuts down
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except _ClickError as error:
        if isinstance(error, _HelpShown):
            sys.exit(2)
        _fail(_explain(error))
    except Exception as error:
        _fail(cause(error))
    sys.exit(code if isinstance(code, int) else 0)


def _explain(error: Any) -> str:
    near = getattr(error, "possibilities", None)
    message = str(error.message if near else error.format_message()).strip().rstrip(".")
    message = message[:1].lower() + message[1:].replace(". Did you mean", "; did you mean")  # typer's, of a command
    message += f"; did you mean {' or '.join(near)}?" if near else ""
    return message if message.endswith("?") else f"{message}; see --help"


def _fail(message: str) -> NoReturn:
    print(f"tiermoe: {one_line(message)}", file=sys.stderr)
    sys.exit(2)
