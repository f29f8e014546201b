"""What people see beside the answer: progress and summaries on standard error, bars on a terminal only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tiermoe.config import format_size

if TYPE_CHECKING:
    from tiermoe.runtime.generate import Report
    from tiermoe.runtime.prepare_store import Progress as ProgressCall


def note(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner on a terminal while something takes a few seconds; nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


@contextlib.contextmanager
def progress_bar() -> Iterator[ProgressCall]:
    """A callback that shows progress: a bar on a terminal, else one line at the beginning and one at the end."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        tasks: dict[str, object] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
                if not console.is_terminal:
                    note(f"{what}: {total} to do")
            bar.update(tasks[what], completed=done)  # type: ignore[arg-type]
            if done == total and not console.is_terminal:
                note(f"{what}: done")

        yield report


def summary(report: Report) -> str:
    """The closing line of an answer."""
    parts = [f"{report.completion_tokens} tokens"]
    if report.decode_tok_s:
        parts.append(f"{report.decode_tok_s:.1f} tok/s")
    if report.bound_tok_s:
        parts.append(f"{report.bound_fraction:.0%} of the bound {report.bound_tok_s:.1f}")
    parts += [
        f"first token after {report.ttft_s:.2f} s",
        f"hit rate {report.hit_rate:.0%}",
        f"{format_size(report.bytes_read)} read",
        f"peak memory {format_size(report.peak_memory_bytes)} of {format_size(report.memory_budget_bytes)}",
    ]
    if report.prefetching:
        parts.append(f"prefetching {report.prefetching}")
    return "[" + ", ".join(parts) + "]"
