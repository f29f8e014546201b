"""What the microbenchmarks share: calls timed in alternation, and what they say of themselves."""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tiermoe.errors import ConfigError
from tiermoe.kernels.linear import cpu_kernels
from tiermoe.lab.bench.cases import alternating
from tiermoe.lab.bench.summary import describe_machine, number, spread
from tiermoe.platform.built import require_kernels

Spread = dict[str, Any]
"""{median, low, high}."""


def timed(
    calls: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each call in each round, after one that does not count. Calls alternate, every other round
    backwards. before: called ahead of each, not timed."""
    for call in calls.values():
        before()
        call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _, name in alternating(list(calls), rounds):
        before()
        began = time.perf_counter()
        calls[name]()
        found[name].append(time.perf_counter() - began)
    return found


def rates(seconds: Sequence[float], amount: float) -> Spread:
    """`amount` per second in each round."""
    found = spread([amount / each for each in seconds])
    assert found is not None
    return found


def ratios(seconds: Mapping[str, Sequence[float]], mine: str) -> dict[str, Spread]:
    """How many times as fast `mine` is as each other, within a round."""
    found = {}
    for name, theirs in seconds.items():
        if name != mine:
            found[name] = spread([b / a for a, b in zip(seconds[mine], theirs, strict=True)])
    return {name: each for name, each in found.items() if each is not None}


def about(rounds: int, threads: int | None = None) -> dict[str, Any]:
    """Machine, kernels, command and date."""
    machine = describe_machine() if threads is None else {**describe_machine(), "threads": threads}
    command = shlex.join(["python", "-m", _module(), *sys.argv[1:]])
    return {
        "machine": machine,
        "kernels": cpu_kernels(),
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rounds": rounds,
    }


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec else sys.argv[0]


class MeasuringParser(argparse.ArgumentParser):
    """The parser of a module that measures tiermoe: it ends the program where the kernels are missing, unless
    `--without-kernels` measures torch."""

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        args, rest = super().parse_known_args(*given, **named)
        try:
            require_kernels(args.without_kernels)
        except ConfigError as error:
            sys.exit(f"{self.prog}: {error}")
        return args, rest


def parser_of(
    text: str | None, rounds: int | None = None, measures: bool = True, **options: Any
) -> argparse.ArgumentParser:
    """The parser of the running module, with its text as help. rounds: the default of `--rounds`; None: no such option.
    measures: whether the module measures tiermoe. options: as `ArgumentParser` takes them."""
    made = MeasuringParser if measures else argparse.ArgumentParser
    layout = argparse.RawDescriptionHelpFormatter
    parser = made(f"python -m {_module()}", description=text, formatter_class=layout, **options)
    if measures:
        parser.add_argument("--without-kernels", action="store_true", help="measure torch, not the compiled kernels")
    if rounds is not None:
        parser.add_argument("--rounds", type=at_least_one, default=rounds, help=f"default {rounds}")
    return parser


def at_least_one(text: str) -> int:
    """A whole number above 0. ValueError for anything else."""
    value = int(text)
    if value < 1:
        raise ValueError(f"{text} is not above 0")
    return value


def numbers(text: str) -> list[int]:
    """Whole numbers above 0 of '1,4,16'. ValueError for anything else."""
    return [at_least_one(word) for word in text.split(",")]


def shown(value: Spread | None) -> str:
    """'52.1 (51.8-52.9)'."""
    if value is None:
        return ""
    return f"{number(value['median'])} ({number(value['low'])}-{number(value['high'])})"


def say(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns on standard error; the first to the left."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        cells = [cell.rjust(width) if column else cell.ljust(width)
                 for column, (cell, width) in enumerate(zip(line, widths, strict=True))]  # fmt: skip
        print("  ".join(cells).rstrip(), file=sys.stderr)
