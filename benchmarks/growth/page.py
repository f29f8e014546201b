"""The report: one plot for each axis, its bends with their reasons, and the figures."""

import html
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.growth.costs import Row, cost, line, series_of
from benchmarks.growth.plots import Curve, plot
from tiermoe.bench.report import machine_words, page
from tiermoe.bench.summary import number, share, size

TITLES = {
    "experts": ("Number of experts", "experts in each layer"),
    "layers": ("Number of layers", "layers"),
    "prompt": ("Length of the prompt", "tokens of the prompt"),
    "budget": ("Shrinking budgets", "experts that the cache holds"),
}
"""Axis → heading, and what runs along it."""

EXPLAINED = """
Each point is a process of its own, warm: it has run the same tokens before. Points are the medians of the rounds, bars
their range; all points alternate, round after round. The budget is the expert cache alone; the files are dropped from
the page cache before each run, and nothing bounds the process. Numbered lines stand where a reason for a bend sets in.
"""
_BELADY = "bound: Belady's misses from the drive, or weights from memory"
_OVERLAPPED = "bound: the run's own computing and reading, wholly overlapped"


def report(document: dict[str, Any]) -> str:
    """The page of what `benchmarks.growth` prints."""
    parts = [
        f"<p>{_text(document['date'])}. <code>{_text(document['command'])}</code></p>",
        machine_words({**document["machine"], "memory_bandwidth": document["memory_bandwidth"]}),
        f"<p>{_text(EXPLAINED)} {_text(document['note'])}</p>",
    ]
    for over, found in document["axes"].items():
        parts.append(f"<h2>{_text(TITLES[over][0])}</h2>")
        parts += pictures(over, found["rows"], found["bends"])
        parts += [_bends(found["bends"]), _list(found["summary"]), _table(found["rows"]), _failures(found["rows"])]
    return page("How cost grows", parts)


def pictures(over: str, rows: Sequence[Row], bends: Sequence[dict[str, Any]]) -> list[str]:
    """The plots of one axis; marks are the numbers of its bends."""
    title, along = TITLES[over]
    marks = [(index, bend["at"]) for index, bend in enumerate(bends, 1)]

    def draw(what: str, up: str, value: Value, bound: Bound, words: str) -> str:
        return plot(f"{title}: {what}", along, up, _curves(rows, value, bound), words, marks)

    if over == "prompt":
        found = [
            draw("time of the prompt", "seconds", cost, _own_seconds, _OVERLAPPED),
            draw("speed", "tokens per second", _of("prefill_tok_s"), _of("compute_bound_tok_s"), _OVERLAPPED),
        ]
    elif over == "budget":
        decode, bound, hits = _of("decode_tok_s"), _of("bound_tok_s"), _of("belady_hit_rate")
        found = [
            draw("speed", "tokens per second", decode, bound, _BELADY),
            draw("hits", "share of experts that were there", _one("hit_rate"), hits, "Belady's"),
            draw("bytes a token", "MB read", _one("bytes_per_token", 1e-6), lambda row: None, ""),
        ]
    else:
        found = [draw("time of a token", "milliseconds", _milliseconds, _bound_milliseconds, _BELADY)]
    return [drawing for drawing in found if drawing]


Value = Callable[[Row], dict[str, float] | None]
Bound = Callable[[Row], float | None]


def _curves(rows: Sequence[Row], value: Value, bound: Bound) -> list[Curve]:
    curves = []
    for series in series_of(rows):
        points, bounds = [], []
        for row in line(rows, series):
            found, best = value(row), bound(row)
            if found is not None:
                points.append((row["x"], found["low"], found["median"], found["high"]))
            if best is not None:
                bounds.append((row["x"], best))
        curves.append(Curve(series, points, bounds))
    return curves


def _of(name: str) -> Callable[[Row], Any]:
    return lambda row: row[name] or None


def _one(name: str, factor: float = 1.0) -> Value:
    """A figure of which only the median is kept."""

    def value(row: Row) -> dict[str, float] | None:
        found = row[name]
        return None if found is None else dict.fromkeys(("median", "low", "high"), found * factor)

    return value


def _own_seconds(row: Row) -> float | None:
    return row["prompt"] / row["compute_bound_tok_s"] if row["compute_bound_tok_s"] else None


def _milliseconds(row: Row) -> dict[str, float] | None:
    found = cost(row)
    return None if found is None else {name: 1e3 * value for name, value in found.items()}


def _bound_milliseconds(row: Row) -> float | None:
    return 1e3 / row["bound_tok_s"] if row["bound_tok_s"] else None


def told(bend: dict[str, Any]) -> str:
    """A bend in a sentence."""
    exponents = [f"{name} {bend[name]:.2f}" for name in ("before", "after") if bend[name] is not None]
    reason = bend["reason"] or "measured; no reason is known here"
    cost_grows = f"exponent of the cost: {', '.join(exponents) or 'not measured'}"
    return f"{bend['series']}, at {bend['at']:.4g}: {reason} ({cost_grows})"


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells, for terminals and the page; columns without a word are left out."""
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("line", lambda row: row["series"]),
        ("at", lambda row: str(row["x"])),
        ("cached", lambda row: f"{row['cache']} of {row['layers'] * row['experts']}"),
        ("decode tok/s", lambda row: _spread(row["decode_tok_s"])),
        ("prefill tok/s", lambda row: _spread(row["prefill_tok_s"])),
        ("bound", lambda row: number(row["bound_tok_s"])),
        ("by", lambda row: row["limited_by"] or ""),
        ("hits", lambda row: share(row["hit_rate"])),
        ("Belady's", lambda row: share(row["belady_hit_rate"])),
        ("read a token", lambda row: size(row["bytes_per_token"])),
    ]
    good = [row for row in rows if not row["error"]]
    columns = [column for column in columns if any(map(column[1], good))]
    return [name for name, _ in columns], [[show(row) for _, show in columns] for row in good]


def failures(rows: Sequence[Row]) -> list[str]:
    """Points without figures, and why."""
    return [f"{row['series']}, at {row['x']}: {row['error']}" for row in rows if row["error"]]


def _spread(speed: dict[str, Any] | None) -> str:
    return "" if speed is None else f"{number(speed['median'])} ({number(speed['low'])}–{number(speed['high'])})"


def _text(words: str) -> str:
    return html.escape(" ".join(words.split()))


def _bends(bends: Sequence[dict[str, Any]]) -> str:
    return f"<ol>{''.join(f'<li>{_text(told(bend))}</li>' for bend in bends)}</ol>" if bends else ""


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(each)}</li>' for each in lines)}</ul>" if lines else ""


def _table(rows: Sequence[Row]) -> str:
    head, cells = table(rows)
    top = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in line)}</tr>" for line in cells)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _failures(rows: Sequence[Row]) -> str:
    return _list([f"without figures: {line}" for line in failures(rows)])
