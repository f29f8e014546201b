"""Pictures of measurements, and the page of `tiermoe bench`: one HTML file for people, which needs nothing but itself
and has no pictures where matplotlib is not installed."""

from __future__ import annotations

import contextlib
import html
import importlib.util
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tiermoe.config import format_size
from tiermoe.errors import ConfigError
from tiermoe.lab.bench.cases import OURS, named
from tiermoe.lab.bench.summary import Column, case_of, failure, figures, heading, notes, number, speeds, spent, split_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE = {
    "svg.fonttype": "none",  # letters stay letters
    "svg.hashsalt": "tiermoe",  # the same picture is the same text
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "figure.constrained_layout.use": True,
    "legend.frameon": False,
}
_LOG_FROM = 20  # times that the largest speed is the smallest, from which on its axis is logarithmic
_PRESETS_LOG_FROM = 3  # the same of the presets' picture, whose rows are many
_PARTS = {"compute_ms": "compute", "wait_ms": "waiting", "framework_ms": "framework"}
_EXACT, _LOSSY = ("#1f77b4", "o"), ("#d1570b", "D")  # colour and mark
_SPEED = "decode, tokens per second (more is better)"

Case = dict[str, Any]
"""What `summary.summarise` says of a case."""


def missing_plots() -> str | None:
    """Why no picture can be drawn here and what to do; None: they can."""
    if importlib.util.find_spec("matplotlib") is not None:
        return None
    return "pictures need matplotlib, which is not installed; pip install 'tiermoe[plots]'"


def require_plots() -> None:
    """ConfigError where no picture can be drawn here."""
    if (reason := missing_plots()) is not None:
        raise ConfigError(reason)


@contextlib.contextmanager
def _drawing(width: float, height: float) -> Iterator[tuple[Figure, io.StringIO]]:
    """An empty figure of so many inches, and what takes its SVG text at the end."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure, text = Figure(figsize=(width, height)), io.StringIO()
        yield figure, text
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))


def _svg(text: io.StringIO) -> str:
    """The element alone, as it stands inside a page."""
    found = text.getvalue()
    return found[found.index("<svg") :]


def _far_apart(values: Sequence[float], times: float) -> bool:
    """Whether positive values are for a logarithmic axis."""
    return min(values) > 0 and max(values) > times * min(values)


def speed_over_budget(cases: Sequence[Case], key: str, title: str) -> str:
    """Tokens per second (`key`) of cases that differ in engine and budget alone: medians with their spread, our bounds
    as dashes, a cross where there are no figures. Empty where no case has any."""
    if not any(case[key] for case in cases):
        return ""
    engines = list(dict.fromkeys(named(case["engine"], case["preset"]) for case in cases))
    budgets = sorted({case_of(case).condition for case in cases}, key=lambda each: each.memory or math.inf)
    step = 0.8 / (len(engines) + 1)
    with _drawing(8.6, 4.2) as (figure, text):
        axes = figure.add_subplot()
        levels = []
        for index, engine in enumerate(engines):
            mine = {case_of(case).condition: case for case in cases if named(case["engine"], case["preset"]) == engine}
            offset = (index - (len(engines) - 1) / 2) * step
            places = [(budgets.index(each) + offset, mine[each]) for each in budgets if each in mine]
            levels += _series(axes, places, key, engine, f"C{index}")
        failed = [case for case in cases if not case[key]]
        if failed:
            axes.plot([], [], "x", color="#222222", label="no figures")
        if key == "decode_tok_s" and any(case["bound_tok_s"] for case in cases if case["engine"] == OURS and case[key]):
            axes.plot([], [], "--", color="#222222", label="bound (Belady's misses)")
        if _far_apart(levels, _LOG_FROM):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xticks(range(len(budgets)), [budget.budget for budget in budgets])
        axes.set_xlim(-0.5, len(budgets) - 0.5)
        axes.grid(visible=False, axis="x")
        axes.set(title=title, xlabel="memory for the whole process", ylabel="tokens per second")
        figure.legend(loc="outside lower center", ncols=4)
    return _svg(text)


def _ranges(lows: Sequence[float], middles: Sequence[float], highs: Sequence[float]) -> list[list[float]]:
    """The lengths of error bars below and above the middles."""
    below, above = zip(lows, middles, strict=True), zip(middles, highs, strict=True)
    return [[middle - low for low, middle in below], [high - middle for middle, high in above]]


def _series(axes: Axes, places: Sequence[tuple[float, Case]], key: str, name: str, colour: str) -> list[float]:
    """Draws the cases of an engine. Returns the speeds that are drawn."""
    good = [(x, case[key]) for x, case in places if case[key]]
    xs = [x for x, _ in good]
    lows, medians, highs = ([speed[name] for _, speed in good] for name in ("low", "median", "high"))
    axes.plot(xs, medians, color=colour, alpha=0.35)
    axes.errorbar(xs, medians, _ranges(lows, medians, highs), fmt="o", color=colour, label=name)
    for x, speed in good:
        axes.annotate(number(speed["median"]), (x, speed["high"]), (0, 4), textcoords="offset points", ha="center")
    levels = [*lows, *highs]
    for x, case in places:
        if not case[key]:
            axes.plot(x, 0.03, "x", color=colour, transform=axes.get_xaxis_transform())
        elif key == "decode_tok_s" and case["engine"] == OURS and case["bound_tok_s"]:
            axes.hlines(case["bound_tok_s"], x - 0.06, x + 0.06, colors=colour, linestyles="dashed")
            levels.append(case["bound_tok_s"])
    return levels


def time_per_token(cases: Sequence[Case]) -> str:
    """Bars of milliseconds of a token of ours: compute, waiting, the framework's own; a line where the bound lies.
    Empty where no case is split so."""
    shown = [case for case in cases if case["token_ms"] is not None]
    if not shown:
        return ""
    labels = [f"{named(case['engine'], case['preset'])}, {case_of(case).condition.label}" for case in shown]
    with _drawing(8.6, 1.2 + 0.3 * len(shown)) as (figure, text):
        axes, left = figure.add_subplot(), [0.0] * len(shown)
        for key, label in _PARTS.items():
            widths = [case[key] for case in shown]
            bars = axes.barh(labels, widths, left=left, label=label, height=0.6)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
        axes.bar_label(bars, [number(total) for total in left], padding=4)
        bounds = [(row, 1e3 / case["bound_tok_s"]) for row, case in enumerate(shown) if case["bound_tok_s"]]
        if bounds:
            at, places = [row for row, _ in bounds], [bound for _, bound in bounds]
            axes.vlines(places, [row - 0.4 for row in at], [row + 0.4 for row in at], colors="#222222", label="bound")
        axes.invert_yaxis()
        axes.margins(x=0.08)
        axes.grid(visible=False, axis="y")
        axes.set_title("Milliseconds of a token")
        figure.legend(loc="outside lower center", ncols=4)
    return _svg(text)


def compare_presets(results: Sequence[dict[str, Any]], labels: Sequence[str] = ()) -> str:
    """A bar chart of the results of `compare` or `simulate`; failed rows are left out. It shows decode tokens per
    second with the range over rounds (in a ladder also over the first row's), and KL divergence with its standard error
    (perplexity where there was no reference, hits where nothing was scored). labels: of the rows; empty: their
    presets."""
    measured = [result for result in results if "error" not in result]
    quality = _quality(measured)
    speeds = [_speed(each) for each in measured]
    first, lossy = measured[0], [bool(result["lossy"]) for result in measured]
    with _drawing(9.2, 1.6 + 0.26 * len(measured)) as (figure, text):
        left, right = figure.subplots(1, 2, sharey=True)
        _rows(left, speeds, lossy, [_speed_and_ratio(each) for each in measured])
        figures = [quality.figure(each) for each in measured]
        _rows(right, [quality.of(each) for each in measured], lossy, figures, share=quality.key == "hit_rate")
        left.set_title(_SPEED, fontsize=9)
        right.set_title(quality.title, fontsize=9)
        left.set_yticks(range(len(measured)), labels or [each["preset"] for each in measured])
        shares = right.secondary_yaxis("left")
        shares.set_yticks(range(len(measured)), [f"{each['cache_fraction']:.0%}" for each in measured])
        shares.set_ylabel("experts that are cached")
        left.invert_yaxis()
        for (colour, mark), label in ((_EXACT, "exact"), (_LOSSY, "lossy: may change what the model says")):
            left.plot([], [], mark, color=colour, label=label)
        figure.legend(loc="outside lower center", ncols=2)
        figure.suptitle(f"Decode speed and {quality.beside}\n{_conditions(first)}")
    return _svg(text)


def sweep_curves(results: Sequence[dict[str, Any]]) -> str:
    """Rows of a sweep (`sweep`, `value`): a line for each preset over the values, decode tokens per second with the
    range over rounds, and quality as in `compare_presets`. Values that are no numbers stand side by side."""
    measured = [result for result in results if "error" not in result]
    quality, name = _quality(measured), measured[0]["sweep"]
    values = list(dict.fromkeys(each["value"] for each in measured))
    numbers = [_as_number(value) for value in values]
    numeric = None not in numbers and len(numbers) > 1
    place = dict(zip(values, numbers if numeric else range(len(values)), strict=True))
    with _drawing(9.2, 3.9) as (figure, text):
        left, right = figure.subplots(1, 2)
        for index, preset in enumerate(dict.fromkeys(each["preset"] for each in measured)):
            mine = sorted(
                (each for each in measured if each["preset"] == preset), key=lambda each: place[each["value"]]
            )
            xs = [place[each["value"]] for each in mine]
            for axes, of in ((left, _speed), (right, quality.of)):
                lows, middles, highs = zip(*map(of, mine), strict=True)
                axes.errorbar(xs, middles, _ranges(lows, middles, highs), fmt="o-", color=f"C{index}", label=preset)
        for axes, title, of in ((left, _SPEED, _speed), (right, quality.title, quality.of)):
            axes.set_title(title, fontsize=9)
            axes.set_xlabel(name)
            axes.set_xticks(list(place.values()), list(map(str, place)))
            axes.set_ylim(0, 1.1 * max(of(each)[2] for each in measured) or 1)
        handles, names = left.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=5)
        figure.suptitle(f"Decode speed and {quality.beside} over {name}\n{_conditions(measured[0])}")
    return _svg(text)


class _Quality(NamedTuple):
    """What is drawn beside speed."""

    key: str
    title: str
    beside: str  # in the picture's title
    form: str  # of its figures

    def of(self, result: dict[str, Any]) -> tuple[float, float, float]:
        """(low, value, high) by the standard error."""
        value, error = result[self.key], result.get(f"{self.key}_se") or 0.0
        return value - error, value, value + error

    def figure(self, result: dict[str, Any]) -> str:
        return f"{result[self.key]:{self.form}}"


def _quality(measured: Sequence[dict[str, Any]]) -> _Quality:
    return next(each for each in _QUALITIES if all(each.key in result for result in measured))


_QUALITIES = (
    _Quality("kl", "KL divergence to 16 bits, nats per token (less is better)", "what it costs", "#.3g"),
    _Quality("perplexity", "perplexity (less is better)", "what it costs", "#.3g"),
    _Quality("rouge2_loss", "loss of ROUGE-2 (less is better)", "what it costs", ".1%"),
    _Quality("hit_rate", "hits, share of the experts asked for (more is better)", "hits", ".1%"),
)
"""The first that all rows have is drawn."""


def _speed(result: dict[str, Any]) -> tuple[float, float, float]:
    """(low, median, high) of decoding; 0 where nothing was decoded."""
    speed = result["decode_tok_s"] or 0.0
    low, high = result.get("decode_tok_s_range", (speed, speed))
    return low, speed, high


def _speed_and_ratio(result: dict[str, Any]) -> str:
    figures, ratio = speed_in_figures(result["decode_tok_s"] or 0.0), result.get("decode_vs_first")
    return figures if ratio is None else f"{figures}  ×{ratio:.2f}"


def _conditions(result: dict[str, Any]) -> str:
    if "rounds" not in result:
        return "replayed"
    return f"{result['tokens']} tokens; rounds: {result['rounds']}; lines: speed's range, the standard error of quality"


def _as_number(value: Any) -> float | None:
    """The number of a value, also of a share like '20%'; None: it is none."""
    try:
        return float(value.removesuffix("%") if isinstance(value, str) else value)
    except (TypeError, ValueError):
        return None


def speed_in_figures(speed: float) -> str:
    """Tokens per second as people read them: '3,859', '24.5'."""
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"


def _rows(
    axes: Axes,
    values: Sequence[tuple[float, float, float]],
    lossy: Sequence[bool],
    figures: Sequence[str],
    share: bool = False,
) -> None:
    """A mark at each value (low, value, high) with a line from low to high, and the value in figures. Values far apart
    that are no shares have a logarithmic axis, at whose beginning values of 0 stand."""
    middles = [value for _, value, _ in values if value > 0]
    lowest = min(low for low, _, _ in values)
    if not share and middles and _far_apart(middles, _PRESETS_LOG_FROM):
        lowest = min(middles) / 1.5
        axes.set_xscale("log", subs=())
        axes.xaxis.get_major_locator().set_params(subs=(1, 2, 5))  # type: ignore[call-arg]
        axes.xaxis.set_major_formatter("{x:g}")
    for row, ((low, value, high), changes, figure) in enumerate(zip(values, lossy, figures, strict=True)):
        colour, mark = _LOSSY if changes else _EXACT
        axes.plot([max(low, lowest), high], [row, row], color=colour)
        axes.plot(max(value, lowest), row, mark, color=colour, clip_on=False)
        axes.annotate(figure, (1.01, row), xycoords=("axes fraction", "data"), va="center", color="#555555")
    if axes.get_xscale() == "log":
        axes.set_xlim(left=lowest)


_PAGE_STYLE = """
body { font: 15px/1.5 sans-serif; color: #222; max-width: 1400px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0; }
.wide { overflow-x: auto; }
th, td { padding: 3px 9px; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td.said { white-space: normal; text-align: left; }
svg { max-width: 100%; height: auto; display: block; margin: 1.2em 0; }
code { background: #f4f4f4; padding: 2px 4px; overflow-wrap: anywhere; }
"""

_EXPLAINED = """
Every run is a process of its own; all engines are fed the same tokens of the same text, with the same threads, and
alternate round after round. Figures are medians, with the lowest and the highest; ratios are medians of those within a
round. A budget is a memory cgroup for the whole process, without swap; a star marks runs without one.
"""
_BOUND = """
The bound of a decoded token is the larger of two times: reading the weights that it uses from memory, and reading the
experts that Belady's choice would miss in as many slots from the drive, both at the bandwidths measured here. "Own
misses" is the share of the bound with the bytes that the run itself read. Compute is the time of matrix kernels,
measured in a pass of its own; waiting is for experts; the framework is the rest.
"""


def html_report(document: dict[str, Any]) -> str:
    """The report of what `tiermoe bench --json` prints."""
    title = f"tiermoe and its peers: {document['model'].get('name', '')}"
    no_plots = missing_plots()
    parts = [
        f"<p>{_text(document['date'])}. <code>{_text(document['command'])}</code></p>",
        _machine_words(document["machine"]),
        f"<p>{_text(_EXPLAINED)}</p>",
        *([f"<p>{_text(no_plots)}</p>"] if no_plots else _pictures(document["cases"])),
        "<h2>Speed</h2>",
        _table(figures(document), speeds(document)),
    ]
    if ours := split_up(document):
        parts += ["<h2>Where the time of a token goes</h2>", "" if no_plots else time_per_token(ours)]
        parts += [f"<p>{_text(_BOUND)}</p>", _table(ours, spent())]
    parts += _left_out(document)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f"<title>{_text(title)}</title><style>{_PAGE_STYLE}</style></head>\n<body>\n<h1>{_text(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _text(words: str) -> str:
    return html.escape(" ".join(words.split()))


def _machine_words(machine: dict[str, Any]) -> str:
    """A paragraph on what was measured on."""
    if not machine:
        return ""
    versions = [f"{name} {machine[name]}" for name in ("python", "torch", "transformers", "accelerate", "tiermoe")
                if name in machine]  # fmt: skip
    parts = [
        f"{machine['cpu']} ({', '.join(machine['instructions']) or 'no vector instructions known'})",
        f"{machine['cores']} cores, {machine['threads']} threads",
        f"memory {format_size(machine['memory_bytes'])}, read at {machine['memory_bandwidth'] / 1e9:.1f} GB/s",
        machine["system"],
        ", ".join(versions),
    ]
    return f"<p>{_text('; '.join(parts))}.</p>"


def _pictures(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Of each group, batch and start: decoding, and the prompt, over the budgets."""
    alike: dict[Any, list[dict[str, Any]]] = {}
    for case in cases:
        alike.setdefault(replace(case_of(case).condition, memory=None), []).append(case)
    found = []
    for condition, group in alike.items():
        words = condition.label.removeprefix("resident, ")
        found += [
            speed_over_budget(group, "decode_tok_s", f"Decode: {words}"),
            speed_over_budget(group, "prefill_tok_s", f"Prefill: {words}"),
        ]
    return [drawing for drawing in found if drawing]


def _table(cases: Sequence[dict[str, Any]], columns: Sequence[Column]) -> str:
    columns = [column for column in columns if any(map(column[1], cases))]
    head = "".join(f"<th>{_text(title)}</th>" for title, _ in columns)
    rows = "".join(f"<tr>{''.join(f'<td>{_text(show(case))}</td>' for _, show in columns)}</tr>" for case in cases)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _left_out(document: dict[str, Any]) -> list[str]:
    rows = [(heading(case), case["error"]) for case in document["cases"] if case["error"]]
    rows += [(one["engine"], f"skipped: {one['reason']}") for one in document["skipped"]]
    said = [
        line for line in notes(document)[1:] if line not in {f"not measured: {failure(c)}" for c in document["cases"]}
    ]
    parts = [f"<p>{_text(line)}</p>" for line in said]
    if rows:
        cells = "".join(f'<tr><td>{_text(name)}</td><td class="said">{_text(why)}</td></tr>' for name, why in rows)
        parts += ["<h2>Without figures</h2>", f"<table><tbody>{cells}</tbody></table>"]
    return parts
