"""Entry of the `tiermoe` command: its subcommands, and one-line errors with exit code 2."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from tiermoe import __version__
from tiermoe.cli.output import plain
from tiermoe.errors import TiermoeError

TRACEBACK = "TIERMOE_TRACEBACK"
"""The environment variable with which an error that was not foreseen ends in a traceback."""

app = typer.Typer(
    name="tiermoe",
    help="Run Mixture-of-Experts language models larger than the memory they run in, exactly.",
    no_args_is_help=True,
    add_completion=False,
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


COMMANDS = {
    "run": "tiermoe.cli.run:run",
    "chat": "tiermoe.cli.chat:chat",
    "serve": "tiermoe.cli.serve:serve",
    "pack": "tiermoe.cli.pack:pack",
    "plan": "tiermoe.cli.plan:plan",
    "show": "tiermoe.cli.show:show",
    "presets": "tiermoe.cli.presets:presets",
    "calibrate": "tiermoe.cli.calibrate:calibrate",
    "compare": "tiermoe.cli.compare:compare",
    "bench": "tiermoe.cli.bench:bench",
    "trace": "tiermoe.cli.trace:trace",
    "simulate": "tiermoe.cli.simulate:simulate",
    "eval": "tiermoe.cli.evaluate:evaluate",
}
"""Command → the function that runs it, in the order of the help."""


def add_commands(words: Sequence[str]) -> None:
    """Makes known the command that the words of a command line begin with, or all: importing all takes a quarter of a
    second."""
    known = {command.name for command in app.registered_commands}
    named = [word for word in words[:1] if word in COMMANDS]
    for name in named or COMMANDS:
        if name not in known:
            module, _, function = COMMANDS[name].partition(":")
            app.command(name)(getattr(importlib.import_module(module), function))


# typer carries its own copy of click; this is that copy's base of all errors in how a command was typed
_TypedWrong: type[Exception] = typer.BadParameter.__mro__[2]
_HELP_SHOWN: type[Exception] = sys.modules[typer.BadParameter.__module__].NoArgsIsHelpError


def main() -> None:
    """Runs the command line. Errors are one line on standard error and exit code 2."""
    add_commands(sys.argv[1:])
    try:
        code = app(standalone_mode=False)
    except TiermoeError as error:
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        # the reader of our output is gone: nothing more to say, also not while the interpreter shuts down
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except MemoryError:
        _fail("out of memory while allocating; lower --memory or --cache, or end other programs")
    except _TypedWrong as error:
        if isinstance(error, _HELP_SHOWN):
            sys.exit(2)
        _fail(_explain(error))
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        kind = type(error).__name__
        _fail(f"an unforeseen error ({kind}: {error}); {TRACEBACK}=1 before the command shows where")
    sys.exit(code if isinstance(code, int) else 0)


def _explain(error: Any) -> str:
    near = getattr(error, "possibilities", None)
    message = str(error.message if near else error.format_message()).strip().rstrip(".")
    message = message[:1].lower() + message[1:]
    return message + (f"; did you mean {' or '.join(near)}?" if near else "; see --help")


def _fail(message: str) -> NoReturn:
    one_line = plain(" ".join(message.split()))  # libraries' messages have several
    print(f"tiermoe: {one_line}", file=sys.stderr)
    sys.exit(2)
