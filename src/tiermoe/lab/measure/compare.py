"""Presets side by side, or variants of presets: each measured in a process of its own, round after round, and summed up
over the rounds.

A process of its own gives every preset the same empty start and the same budget, and a preset that cannot run takes no
other with it. The processes are forked from one that has imported torch, which took longer than many a measurement.
Every other round goes backwards, so that a machine that slows down or speeds up favours no preset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiermoe.errors import ConfigError, TiermoeError
from tiermoe.lab.measure.pairs import Pair
from tiermoe.offload.plugins import load_files, named_files
from tiermoe.offload.presets import all_presets, preset_named

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

BASELINES = ("load-on-demand", "lru")
"""Presets that the others' speeds are divided by."""

_RANGED = ("decode_tok_s", "prefill_tok_s")


@dataclass(frozen=True, slots=True)
class Variant:
    """A preset with what one row of a table changes."""

    preset: str
    set: Mapping[str, Any] = field(default_factory=dict)  # parts and settings
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the command
    point: Mapping[str, Any] = field(default_factory=dict)
    """Names the row among those of its preset, as `--json` prints it: `sweep` and `value`, or `part`."""


Measure = Callable[[Variant], dict[str, Any]]
"""Variant → the object that `tiermoe eval --json` prints. TiermoeError, with the reason, where it cannot run."""


@dataclass(slots=True)
class Measured:
    """The measurements of one variant."""

    variant: Variant
    rounds: list[dict[str, Any]] = field(default_factory=list)  # the result of each round
    error: str | None = None  # why there is none


def presets_asked(text: str) -> list[str]:
    """'all', or names with commas, each once. ConfigError for an unknown one."""
    if text.strip() == "all":
        return all_presets()
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("no preset is named; use --presets all, or names like hobbit,lru")
    return list(dict.fromkeys(preset_named(name).name for name in names))


def measure_all(
    variants: Sequence[Variant], rounds: int, measure: Measure, progress: Callable[[int, int], None]
) -> list[Measured]:
    """Measures each variant once a round; one that fails is not run again. progress: called with (done, in all)."""
    rows = [Measured(variant) for variant in variants]
    done, total = 0, rounds * len(rows)
    progress(done, total)
    for round_ in range(rounds):
        for row in rows if round_ % 2 == 0 else reversed(rows):
            if row.error is None:
                try:
                    row.rounds.append(measure(row.variant))
                except TiermoeError as error:
                    row.error = str(error)
            done += 1
            progress(done, total)
    return rows


def summarise(rows: Sequence[Measured]) -> list[dict[str, Any]]:
    """One object per variant, those that failed (`preset`, `error`) last. Presets alone stand with the fastest decode
    first, points of a sweep or a ladder in the order of `rows`.

    Numbers are medians over the rounds; `NAME_range` is [least, most] of a speed; `decode_vs_lru` and the like are
    medians of the ratios within a round, so that what slows a whole round down does not count.
    """
    whole = [row for row in rows if row.error is None]
    results = [{**_median(row), **row.variant.point, **ratios(row, rows)} for row in whole]
    if not any(row.variant.point for row in whole):
        results.sort(key=lambda result: -result["decode_tok_s"])
    failed = [row for row in rows if row.error is not None]
    return results + [{"preset": row.variant.preset, **row.variant.point, "error": row.error} for row in failed]


def _median(row: Measured) -> dict[str, Any]:
    first = row.rounds[0]
    result = {name: _middle([each[name] for each in row.rounds]) for name in first}
    for name in _RANGED:
        values = [each[name] for each in row.rounds]
        result[f"{name}_range"] = [min(values), max(values)]
    return result | {"rounds": len(row.rounds)}


def _middle(values: list[Any]) -> Any:
    """The median of numbers that differ; what is the same in every round, or is no number, as it is."""
    import statistics

    if all(value == values[0] for value in values) or not isinstance(values[0], int | float):
        return values[0]
    return statistics.median(values)


def ratios(row: Measured, rows: Sequence[Measured]) -> dict[str, float]:
    """How many times as fast a row is as others, by the names that `--json` prints: in a ladder as the preset's first
    row (`decode_vs_first`) and as the one before (`decode_vs_before`), else as `BASELINES` at the same point."""
    import statistics

    found = {}
    for other, theirs in _others(row, rows).items():
        for name in _RANGED:
            pairs = zip(row.rounds, theirs.rounds, strict=True)
            values = [ours[name] / their[name] for ours, their in pairs if ours[name] and their[name]]
            if values:
                found[f"{name.removesuffix('_tok_s')}_vs_{other.replace('-', '_')}"] = statistics.median(values)
    return found


def _others(row: Measured, rows: Sequence[Measured]) -> dict[str, Measured]:
    """Name → the row that the speeds of `row` are divided by; those that failed are absent."""
    if "part" in row.variant.point:
        steps = [each for each in rows if each.variant.preset == row.variant.preset]
        at = steps.index(row)
        found = {"first": steps[0]} | ({"before": steps[at - 1]} if at else {})
    else:
        beside = {each.variant.preset: each for each in rows if each.variant.point == row.variant.point}
        found = {name: beside[name] for name in BASELINES if name in beside}
    return {name: each for name, each in found.items() if each.error is None}


@dataclass(frozen=True, slots=True)
class Case:
    """What one process evaluates."""

    model: str
    text: str
    shape: tuple[int, int, int]  # tokens of a window's prompt, scored tokens of a window, scored tokens in all
    options: dict[str, Any]  # of `tiermoe.load`
    reference: str = "none"  # as `Evaluation.run` takes it
    save: Path | None = None  # the file to which the 16-bit weights' scores go, instead of an evaluation
    pairs: tuple[Pair, ...] = ()  # documents with their summaries, in the place of a text
    metric: str = "perplexity"  # of `evaluate.METRICS`


def evaluate_apart(case: Case, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """The object that `tiermoe eval --json` prints, from a process of its own, forked where the system can from a
    server that has imported torch. progress: of packing and of the 16-bit weights, not of the scoring. TiermoeError,
    with the reason, where the evaluation fails."""
    import multiprocessing  # late, as `statistics` below: `--help` of two commands imports this module

    start = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(start)
    context.set_forkserver_preload(["tiermoe.lab.measure.fork_server"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_evaluate, args=(case, named_files(), sender), daemon=True)
    process.start()
    sender.close()
    try:
        while True:
            kind, content = receiver.recv()
            if kind == "progress":
                progress(*content)
            elif kind == "error":
                raise TiermoeError(content)
            else:
                result: dict[str, Any] = content
                return result
    except EOFError:
        process.join()
        raise TiermoeError(_ended(process.exitcode or 0)) from None
    finally:
        process.terminate()
        process.join()


def _ended(code: int) -> str:
    if code < 0:
        return f"its process was ended by signal {-code}; 9 is often the system out of memory"
    return f"its process ended with {code}"


def _evaluate(case: Case, plugins: Sequence[Path], sender: Connection) -> None:
    """Runs in the process: sends progress, and in the end the result or the error."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asked ends this one
    from tiermoe.lab.measure.fork_server import evaluate, texts  # late: the process that asks needs no torch

    def report(what: str, done: int, total: int) -> None:
        if what != evaluate.SCORING:
            sender.send(("progress", (what, done, total)))

    try:
        load_files(plugins)  # the server may have been started without them
        shape = texts.WindowShape(*case.shape)
        evaluation = evaluate.prepare(case.model, case.pairs or case.text, shape, case.options, case.metric)
        if case.save is not None:
            sender.send(("result", evaluation.save_reference(case.save, report)))
        else:
            sender.send(("result", evaluation.run(case.reference, report)))
    except TiermoeError as error:
        sender.send(("error", str(error)))
    except Exception as error:  # one preset's failure takes no other with it
        sender.send(("error", f"{type(error).__name__}: {error}"))
