"""One HTML file for people: pictures, tables, machine and command. It needs nothing but itself, and has no pictures
where matplotlib is not installed."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tiermoe.config import format_size
from tiermoe.lab.bench.plots import missing_plots, speed_over_budget, time_per_token
from tiermoe.lab.bench.summary import Column, case_of, failure, figures, heading, notes, speeds, spent, split_up

_STYLE = """
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
    return _page(title, parts)


def _page(title: str, parts: Sequence[str]) -> str:
    """A whole document under a heading. parts: HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>\n<body>\n<h1>{_text(title)}</h1>\n"
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
