"""Entry of the `tiermoe` command: its subcommands, and one-line errors with exit code 2."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from tiermoe import __version__
from tiermoe.cli.output import TRACEBACK, cause, ends_at_once, one_line

COMMANDS = {
    "run": ("tiermoe.cli.run:run", "Answer one prompt; the first run of a model packs its experts."),
    "chat": ("tiermoe.cli.chat:chat", "Talk to a model in the terminal."),
    "serve": ("tiermoe.cli.serve:serve", "Serve a model to OpenAI's and Anthropic's clients."),
    "pack": ("tiermoe.cli.pack:pack", "Pack a model's experts ahead of the first run."),
    "plan": ("tiermoe.cli.plan:plan", "Show how a memory budget would be used and how fast the model would run."),
    "show": ("tiermoe.cli.show:show", "Show what a model or a store holds."),
    "presets": ("tiermoe.cli.presets:presets", "List the presets, or show what one is made of."),
    "calibrate": ("tiermoe.cli.calibrate:calibrate", "Learn from a text what a preset needs to know of a model."),
    "compare": ("tiermoe.cli.compare:compare", "Run presets over the same text: speed, bytes, loss."),
    "bench": ("tiermoe.cli.bench:bench", "Measure a model's speed, beside llama.cpp's if asked."),
    "trace": ("tiermoe.cli.trace:trace", "Record which experts a text uses."),
    "simulate": ("tiermoe.cli.simulate:simulate", "Replay a recorded trace on a virtual machine."),
    "eval": ("tiermoe.cli.evaluate:evaluate", "Measure a model's loss on a text."),
}
"""Command → the function that runs it, and its line in the list of commands, in the order of that list."""


class LazyCommands(TyperGroup):
    """A group of commands that imports a command's module when the command is invoked, or its help is: importing every
    module, and torch with them, takes seconds."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=line) for name, (_, line) in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in COMMANDS:
            module, _, function = COMMANDS[args[0]][0].partition(":")
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            with ends_at_once():
                command = getattr(importlib.import_module(module), function)
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


def _version(asked: bool) -> None:
    if asked:
        print(f"tiermoe {__version__}")
        raise typer.Exit


@app.callback(epilog=f"{TRACEBACK}=1 in the environment shows the traceback of an error that was not foreseen.")
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_version, is_eager=True),
) -> None:
    """Run Mixture-of-Experts language models larger than the memory they run in, exactly."""


# typer carries its own copy of click; this is that copy's base of all errors in how a command was typed
_TypedWrong: type[Exception] = typer.BadParameter.__mro__[2]
_HELP_SHOWN: type[Exception] = sys.modules[typer.BadParameter.__module__].NoArgsIsHelpError


def main() -> None:
    """Runs the command line. Errors are one line on standard error and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        # the reader of our output is gone: nothing more to say, also not while the interpreter shuts down
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except _TypedWrong as error:
        if isinstance(error, _HELP_SHOWN):
            sys.exit(2)
        _fail(_explain(error))
    except Exception as error:
        _fail(cause(error))
    sys.exit(code if isinstance(code, int) else 0)


def _explain(error: Any) -> str:
    near = getattr(error, "possibilities", None)
    message = str(error.message if near else error.format_message()).strip().rstrip(".")
    message = message[:1].lower() + message[1:]
    return message + (f"; did you mean {' or '.join(near)}?" if near else "; see --help")


def _fail(message: str) -> NoReturn:
    print(f"tiermoe: {one_line(message)}", file=sys.stderr)
    sys.exit(2)
