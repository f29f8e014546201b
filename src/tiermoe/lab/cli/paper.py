"""`tiermoe paper`: a paper's figures and tables, its values beside ours."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tiermoe.cli import options as opt
from tiermoe.cli.output import note, progress_bar, spinner
from tiermoe.cli.terminal import WIDE, Terminal
from tiermoe.errors import ConfigError, TiermoeError

if TYPE_CHECKING:
    from tiermoe.lab.papers import Figure, Paper, Row
    from tiermoe.lab.papers.figure import Measure, Runs, Side, Windows
    from tiermoe.lab.trace import Trace


Name = Annotated[
    str | None, typer.Argument(help="hobbit, edgemoe, mobile, fate or corm. Without it: the list.", show_default=False)
]
Figures = Annotated[
    list[str] | None,
    typer.Option("--figure", help="Like 13, 'table 3' or all; again for another. Without it: the paper's list.",
                 show_default=False),
]  # fmt: skip
TraceFile = Annotated[
    Path | None, typer.Option(help="A routing trace, which replays and statistics are of.", show_default=False)
]
CostsOf = Annotated[
    Path | None,
    typer.Option("--costs", help="A trace whose costs replays charge. Default: those of --trace.", show_default=False),
]
Profiles = Annotated[
    Path | None, typer.Option(help="Folder of calibrations (NAME.json) for presets that need one.", show_default=False)
]
Model = Annotated[str | None, typer.Option(help="A model, for figures of quality.", show_default=False)]
Text = Annotated[Path | None, typer.Option(help="A text file to score it on, UTF-8.", show_default=False)]
Tokens = Annotated[int, typer.Option(help="Tokens to score, in windows of 32 + 256.")]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a list of JSON objects, one for each row.")]


@dataclass(frozen=True, slots=True)
class Found:
    """A row of a figure with ours."""

    figure: Figure
    row: Row
    ours: str
    moved: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        what = {"figure": self.figure.name, "title": self.figure.title, "what": self.row.what, "kind": self.row.kind}
        values = {"paper": self.row.paper, "ours": self.ours, "moved": self.moved, "given": self.row.given}
        return {**what, **values, "same_order": self.row.same_order(self.ours), "turned_by": self.turned_by}

    @property
    def turned_by(self) -> list[str]:
        """What turns the order of a ratio into the paper's, if it is the other one."""
        if self.row.same_order(self.ours) is not False:
            return []
        return [what for what, value in self.moved.items() if self.row.same_order(value)]


def paper(
    name: Name = None,
    figures: Figures = None,
    trace: TraceFile = None,
    costs: CostsOf = None,
    profiles: Profiles = None,
    model: Model = None,
    text: Text = None,
    tokens: Tokens = 1024,
    as_markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Make a paper's figures and tables on a model of yours: the paper's values, ours, and what moves ours.

    Replays and statistics take --trace (tiermoe trace MODEL --text FILE --out
    TRACE; corm's with --neurons THETA) and --profiles (a folder of
    calibrations, which tiermoe calibrate makes beside a model's store). Quality
    takes --model and --text. Speeds are replayed on the paper's machine
    (simulate --machine), with the cache that the row names or 45 % of the
    experts (EdgeMoE: 20 %). They charge what deciding took the engine where the
    trace was made with tiermoe trace --costs. Of a large model that holds
    computing on this machine, too: --costs names the trace of a small one.

    kind: measured by the engine, replayed with named costs, or counted in a
    trace. What is given follows from what was put in, and stands apart.
    moved by: the same with what may be the cause of a difference taken away.
    """
    from tiermoe.lab.papers import PAPERS
    from tiermoe.lab.trace import read_trace

    if name is None:
        if figures:
            raise ConfigError(f"--figure {figures[0]} of which paper? name one of {', '.join(PAPERS)}")
        _print_papers(list(PAPERS.values()))
        return
    if name not in PAPERS:
        raise ConfigError(f"unknown paper '{name}'; known: {', '.join(PAPERS)}")
    chosen = _chosen(PAPERS[name], figures or [])
    if not chosen:
        _print_figures(PAPERS[name])
        return
    if (model is None) != (text is None):
        raise ConfigError("--model and --text go together: quality is scored on a text; give both or neither")
    if trace is None and model is None:
        raise ConfigError(
            "on which model? give --trace FILE for replays and statistics, --model and --text for quality"
        )
    recorded = None if trace is None else read_trace(trace)
    if costs is not None:
        recorded = _charged(recorded, costs)
    found = _made(chosen, recorded, profiles, model, text, tokens)
    if as_json:
        print(json.dumps([each.as_dict() for each in found]))
    elif as_markdown:
        print(_markdown(found))
    else:
        _print(chosen, found)


def _chosen(of: Paper, names: Sequence[str]) -> list[Figure]:
    """The figures named; a number alone is a figure's. ConfigError for what the paper or this command does not have."""
    if "all" in names:
        return list(of.figures)
    chosen = []
    for name in names:
        wanted = re.sub(r"^fig(ure|\.)?\s*(?=\d)", "figure ", name.strip(), flags=re.IGNORECASE)
        wanted = f"figure {wanted}" if wanted[:1].isdigit() else wanted
        if why := next((why for known, why in of.missing.items() if known.lower() == wanted.lower()), None):
            raise ConfigError(f"{wanted} of {of.name} cannot be had here: {why}")
        found = [each for each in of.figures if each.name.lower() == wanted.lower()]
        if not found:
            raise ConfigError(
                f"no {wanted} of {of.name} here; known: {', '.join(each.name for each in of.figures)}, or all"
            )
        chosen += found
    return chosen


def _charged(recorded: Trace | None, path: Path) -> Trace:
    """A trace with the costs of the one at `path`. ConfigError where either is lacking."""
    from tiermoe.lab.trace import read_trace

    if recorded is None:
        raise ConfigError(f"--costs {path} is what replays of a trace charge; give --trace FILE beside it")
    costs = read_trace(path).header.costs
    if costs is None:
        raise ConfigError(f"the trace {path} holds no costs; make it again with tiermoe trace --costs PRESETS")
    return replace(recorded, header=replace(recorded.header, costs=costs))


def _made(
    figures: Sequence[Figure], recorded: Trace | None, profiles: Path | None, model: str | None, text: Path | None,
    tokens: int,
) -> list[Found]:  # fmt: skip
    """Every row of the figures. ConfigError where a row could be had of nothing that was given."""
    from tiermoe.lab.papers.figure import Runs

    with tempfile.TemporaryDirectory() as folder:
        evaluate = None if model is None or text is None else _evaluation(model, opt.read_text(text), tokens, folder)
        with spinner("replaying"):
            runs = Runs(recorded, profiles, evaluate)
            found = [
                Found(figure, row, _ours(row.ours, runs), {what: _ours(each, runs) for what, each in row.moved.items()})
                for figure in figures
                for row in figure.rows
            ]
        for line in sorted(runs.borrowed - {""}):
            note(line)
        return found


def _evaluation(model: str, content: str, tokens: int, folder: str) -> Callable[[Side, Windows], dict[str, Any]]:
    """Evaluations in processes of their own, beside the checkpoint's own weights, which are scored once."""
    from tiermoe.lab.measure.compare import Case, evaluate_apart
    from tiermoe.lab.papers.figure import BITS
    from tiermoe.offload.presets import PRESETS

    def evaluate(side: Side, windows: Windows) -> dict[str, Any]:
        shape = (*windows, tokens)
        reference = Path(folder) / f"reference-{windows[0]}-{windows[1]}"
        with progress_bar() as progress:
            if not reference.exists():
                evaluate_apart(Case(model, content, shape, {}, str(reference), reference), progress)
            options = {"preset": side.preset, "set": dict(side.changes), "cache": side.share or "45%"}
            bits = {"bits": side.bits or PRESETS[side.preset].bits or BITS}
            return evaluate_apart(Case(model, content, shape, options | bits, str(reference)), progress)

    return evaluate


_LACKING = "not had: "


def _ours(measure: Measure, runs: Runs) -> str:
    try:
        return measure.value(runs)
    except TiermoeError as error:
        return f"{_LACKING}{error}"


class _Reasons:
    """Numbered footnotes of a table: the errors of its missing values, each listed once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def cell(self, value: str) -> str:
        """A value, or the number of its reason."""
        if not value.startswith(_LACKING):
            return value
        number = self.numbers.setdefault(value.removeprefix(_LACKING), len(self.numbers) + 1)
        return f"({number})"

    def lines(self) -> list[str]:
        return [f"({number}) not had: {reason}" for reason, number in self.numbers.items()]


def _print_papers(papers: Sequence[Paper]) -> None:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("paper", "title", "figures", "not here"):
        table.add_column(heading)
    for each in papers:
        table.add_row(each.name, each.title, str(len(each.figures)), str(len(each.missing)))
    Terminal(piped=WIDE).print(table)
    note("tiermoe paper NAME lists a paper's figures; --figure makes one")


def _print_figures(of: Paper) -> None:
    table = Table(title=of.title, title_justify="left", box=SIMPLE_HEAD)
    for heading in ("figure", "shows", "rows"):
        table.add_column(heading)
    for figure in of.figures:
        table.add_row(figure.name, figure.title, str(len(figure.rows)))
    for name, why in of.missing.items():
        table.add_row(name, f"not here: {why}", "")
    Terminal(piped=WIDE).print(table)
    note(f"tiermoe paper {of.name} --figure 'NAME' --trace TRACE --profiles FOLDER makes one")


def _print(figures: Sequence[Figure], found: Sequence[Found]) -> None:
    for figure in figures:
        table, reasons = Table(title=_titled(figure), title_justify="left", box=SIMPLE_HEAD), _Reasons()
        for heading in _HEADINGS:
            table.add_column(heading)
        for each in found:
            if each.figure is figure:
                table.add_row(*_cells(each, reasons, "\n"))
        Terminal(piped=WIDE).print(table)
        for line in reasons.lines():
            note(line)
    note(_orders(found))


def _markdown(found: Sequence[Found]) -> str:
    """One table of what could have come out otherwise, one of what is given, and how many ratios have the paper's
    order."""
    reasons = _Reasons()
    lines = [_orders(found), "", f"| figure | {' | '.join(_HEADINGS)} |", "|---|---|---|--:|--:|---|"]
    lines += [_line(each, reasons) for each in found if not each.row.given]
    lines += [f"\n{line}" for line in reasons.lines()]
    if given := [each for each in found if each.row.given]:
        lines += ["", "Given, and no evidence:", "", "| figure | what | paper | ours | follows from |"]
        lines += ["|---|---|--:|--:|---|"]
        lines += [f"| {_short(e)} | {e.row.what} | {e.row.paper} | {e.ours} | {e.row.given} |" for e in given]
    return "\n".join(lines)


def _line(each: Found, reasons: _Reasons) -> str:
    return f"| {_short(each)} | {' | '.join(_cells(each, reasons, '; '))} |"


def _short(each: Found) -> str:
    """A figure's name, as a table has it."""
    return each.figure.name.replace("figure ", "").replace("section", "s.").replace("table", "t.")


def _orders(found: Sequence[Found]) -> str:
    """How many of the rows with a ratio in the paper lie on the paper's side of 1; the others, with what turns them."""
    ratios = [each for each in found if each.row.same_order(each.ours) is not None]
    others = [each for each in ratios if not each.row.same_order(each.ours)]
    turned = [f"{_short(each)}, {each.row.what} ({'; '.join(each.turned_by)})" for each in others if each.turned_by]
    unexplained = [f"{_short(each)}, {each.row.what}" for each in others if not each.turned_by]
    text = f"{len(ratios) - len(others)} of {len(ratios)} ratios have the paper's order."
    text += f" Turned by a cause: {'. '.join(turned)}." if turned else ""
    return text + (f" Not explained: {'. '.join(unexplained)}." if unexplained else "")


_HEADINGS = ("what", "kind", "paper", "ours", "moved by")


def _titled(figure: Figure) -> str:
    return f"{figure.name}: {figure.title}"


def _cells(each: Found, reasons: _Reasons, separator: str) -> tuple[str, ...]:
    """The cells of a row. separator: between the entries of the column 'moved by'."""
    moved = separator.join(f"{what}: {reasons.cell(ours)}" for what, ours in each.moved.items())
    return each.row.what, each.row.kind, each.row.paper, reasons.cell(each.ours), moved
