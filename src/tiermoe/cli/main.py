"""Entry of the `tiermoe` command: its subcommands, and one-line errors with exit code 2."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import typer

from tiermoe import __version__
from tiermoe.cli.bench import bench
from tiermoe.cli.calibrate import calibrate
from tiermoe.cli.chat import chat
from tiermoe.cli.compare import compare
from tiermoe.cli.evaluate import evaluate
from tiermoe.cli.pack import pack
from tiermoe.cli.plan import plan
from tiermoe.cli.presets import presets
from tiermoe.cli.run import run
from tiermoe.cli.serve import serve
from tiermoe.cli.show import show
from tiermoe.cli.simulate import simulate
from tiermoe.cli.trace import trace
from tiermoe.errors import TiermoeError

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


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_version, is_eager=True),
) -> None:
    """Run Mixture-of-Experts language models larger than the memory they run in, exactly."""


for command in (run, chat, serve, pack, plan, show, presets, calibrate, compare, bench, trace, simulate):
    app.command()(command)
app.command("eval")(evaluate)


# typer carries its own copy of click; this is that copy's base of all errors in how a command was typed
_TypedWrong: type[Exception] = typer.BadParameter.__mro__[2]
_HELP_SHOWN: type[Exception] = sys.modules[typer.BadParameter.__module__].NoArgsIsHelpError


def main() -> None:
    """Runs the command line. Errors of the user's making are one line on standard error and exit code 2."""
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
    sys.exit(code if isinstance(code, int) else 0)


def _explain(error: Any) -> str:
    near = getattr(error, "possibilities", None)
    message = str(error.message if near else error.format_message()).strip().rstrip(".")
    message = message[:1].lower() + message[1:]
    return message + (f"; did you mean {' or '.join(near)}?" if near else "; see --help")


def _fail(message: str) -> NoReturn:
    one_line = " ".join(message.split())  # libraries' messages have several
    print(f"tiermoe: {one_line}", file=sys.stderr)
    sys.exit(2)
