"""`tiermoe bench`: this program and its peers side by side, in one run, as tables on a terminal."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tiermoe.cli import options as opt
from tiermoe.cli.options import read_text
from tiermoe.cli.output import note, progress_bar, starting
from tiermoe.cli.terminal import Terminal
from tiermoe.config import settings
from tiermoe.errors import ConfigError
from tiermoe.lab.bench.cases import (
    RANDOM,
    BenchConfig,
    conditions,
    parse_budgets,
    parse_groups,
    parse_numbers,
    parse_peers,
    parse_starts,
    text_file,
)
from tiermoe.lab.bench.report import missing_plots
from tiermoe.lab.bench.summary import Column, case_of, figures, issue_rows, notes, speeds, spent, split_up
from tiermoe.lab.cli import options as lab
from tiermoe.lab.measure.compare import presets_asked
from tiermoe.platform.built import require_kernels
from tiermoe.platform.machine import processors

if TYPE_CHECKING:
    from tiermoe.lab.bench.session import Session, Step


_WIDE = 200  # columns of a table that goes to a file or a pipe


def _drawn(cases: list[dict[str, Any]], columns: list[Column]) -> Table:
    found = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, (title, _) in enumerate(columns):
        found.add_column(title, justify="right" if index else "left", no_wrap=not index)
    for case, later in zip(cases, [*cases[1:], None], strict=True):
        ends = later is not None and case_of(later).condition != case_of(case).condition
        found.add_row(*(show(case) for _, show in columns), end_section=ends)
    return found


Rounds = Annotated[int, typer.Option(help="Times that each case is run, its engines alternating.")]
Timeout = Annotated[float, typer.Option(help="Seconds that one run may take.")]


@opt.engine_options(only=["bits", "dense_bits", "kv_bits", "set", "threads", "store"])
def bench(
    model: opt.Model,
    options: dict[str, Any],
    memory: Annotated[
        str | None,
        typer.Option(help="Bounds on the whole process, like 700MiB,450MiB,none. Default: none.", show_default=False),
    ] = None,
    groups: Annotated[str, typer.Option(help="Tokens of prompt and output, like 16x32,128x128, or none.")] = "16x32",
    prefill: Annotated[
        str | None, typer.Option(help="Prompts alone, like 512,2048, in a batch of one.", show_default=False)
    ] = None,
    batch: Annotated[str, typer.Option(help="Sequences decoded together, like 1,4,16.")] = "1",
    start: Annotated[str, typer.Option(help="warm (after a first pass), cold (empty caches), or warm,cold.")] = "warm",
    presets: Annotated[str, typer.Option(help="Ours: names with commas, all, or none.")] = "default",
    peers: Annotated[
        str | None,
        typer.Option(help="all, none, or of llama.cpp,transformers,accelerate.", show_default="all"),
    ] = None,
    rounds: Rounds = 3,
    text: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 text file: the input of every engine; 'random': random token ids. Default: the held-out text.",
            show_default=False,
        ),
    ] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(
            help="A GGUF file of the model for llama.cpp. Default: the model, where it is one.", show_default=False
        ),
    ] = None,
    peer_python: Annotated[
        str, typer.Option(help="Interpreter that has llama-cpp-python.", show_default="this one")
    ] = sys.executable,
    timeout: Timeout = 600.0,
    out: Annotated[
        Path | None,
        typer.Option(help="Append each run to this .jsonl as it ends, and go on from it.", show_default=False),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a picture and tables into this .html file.", show_default=False)
    ] = None,
    row: Annotated[
        bool,
        typer.Option("--row", help="Print a line for an issue report; without peers, unless --peers names them."),
    ] = False,
    without_kernels: lab.WithoutKernels = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Measure presets and the programs people run instead: same model, text, threads and memory, in one run."""
    settings(**options)
    require_kernels(without_kernels)
    if row and as_json:
        raise ConfigError("--row and --json exclude each other; give one of them")
    threads = options.pop("threads", None) or processors()
    if "store" in options:
        options["store"] = str(options["store"])  # it goes to other processes as JSON
    config = BenchConfig(
        model,
        conditions=conditions(
            parse_budgets(memory), parse_groups(groups), parse_numbers(prefill, "prefill"),
            parse_numbers(batch, "batch"), parse_starts(start),
        ),
        presets=[] if presets.strip() == "none" else presets_asked(presets),
        peers=parse_peers(peers or ("none" if row else "all")),
        options=options,
        rounds=rounds,
        threads=threads,
        timeout=timeout,
        text=None if text == Path(RANDOM) else read_text(text_file(text)),
        gguf=gguf,
        peer_python=peer_python,
        out=out,
    )  # fmt: skip
    config.check()
    with starting():
        from tiermoe.platform import process_memory

        process_memory.import_libraries(own_process=True)
        from tiermoe.lab.bench.report import html_report
        from tiermoe.lab.bench.session import Session, writable
    with writable(report, "--report"):
        session = Session(config)
        interrupted = _run(session)
        document = session.document()
        if as_json:
            print(json.dumps(document, indent=1))
        elif row:
            print("\n".join(issue_rows(document)))
        else:
            _print(document)
        if report is not None:
            report.write_text(html_report(document), encoding="utf-8")
            if (reason := missing_plots()) is not None:
                note(f"the report has tables alone: {reason}")
    if interrupted:
        note("interrupted: these are the cases that had ended")
        raise typer.Exit(130)
    if all(case["error"] for case in document["cases"]):
        raise typer.Exit(1)


def _run(session: Session) -> bool:
    """Measures, with a line for each run that ends; whether it was interrupted after the first one."""
    try:
        with _ended_as_by_ctrl_c(), progress_bar() as progress:
            for step in session.run(progress, note):
                note(_line(step))
    except KeyboardInterrupt:
        if not any(row.rounds or row.error for row in session.measured):
            raise
        return True
    return False


@contextlib.contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM, too, ends the engine that runs, removes what was made for it and prints what there is."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _line(step: Step) -> str:
    said = step.result.get("error")
    if said is None:
        names = {"decode_tok_s": "tok/s", "prefill_tok_s": "tok/s of prompt"}
        said = ", ".join(f"{step.result[key]:.2f} {unit}" for key, unit in names.items() if step.result.get(key))
    return f"[{step.done}/{step.total}] {step.case.name}, {step.case.condition.label}: {said}"


def _print(document: dict[str, Any]) -> None:
    """The speeds of every case that has figures, a rule between conditions; then where our own time went."""
    console = Terminal(piped=_WIDE)
    for cases, columns in ((figures(document), speeds(document)), (split_up(document), spent())):
        if cases:
            console.print(_drawn(cases, [column for column in columns if any(map(column[1], cases))]))
    for line in notes(document):
        note(line)
