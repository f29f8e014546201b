"""Answers on standard output; notes, spinners, progress and summaries on standard error. Bars and Markdown
appear on a terminal only."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tiermoe.config import format_size
from tiermoe.errors import PromptError, TiermoeError
from tiermoe.platform.process_memory import import_libraries

if TYPE_CHECKING:
    from tiermoe.engine.generate import Report
    from tiermoe.model.prepare_store import Progress as ProgressCall

SECONDS_BETWEEN = 5.0
"""Seconds between two lines of progress, at least, where standard error is no terminal."""
TRACEBACK = "TIERMOE_TRACEBACK"
"""Environment variable: unexpected errors end in a traceback."""

BOUND = "the {:.1f} that drive and computing allow"
"""A bound in tokens a second, in words."""


def note(text: str) -> None:
    """Prints lines on standard error."""
    print("\n".join(map(plain, text.split("\n"))), file=sys.stderr, flush=True)


def plain(text: str) -> str:
    """Untrusted text for a terminal: characters that a terminal obeys, or cannot show, are escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def one_line(text: str) -> str:
    """`plain` text without newlines: messages of libraries have several lines."""
    return plain(" ".join(text.split()))


def cause(error: Exception) -> str:
    """The message that is printed for an error. An unexpected one is raised where `TRACEBACK` is set."""
    if isinstance(error, TiermoeError):
        return str(error)
    if isinstance(error, MemoryError):
        return "out of memory while allocating; lower --memory or --cache, or end other programs"
    if os.environ.get(TRACEBACK):
        raise error
    return f"an unforeseen error ({type(error).__name__}: {error}); {TRACEBACK}=1 before the command shows where"


@contextlib.contextmanager
def utf8_input() -> Iterator[None]:
    """Around reads of standard input: PromptError where the input is not UTF-8."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not valid UTF-8 ({error.reason}); convert it first") from None


def shows_markdown() -> bool:
    """Whether standard output is a terminal that can show Markdown, and NO_COLOR does not ask for bare text."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")


@contextlib.contextmanager
def printed(markdown: bool) -> Iterator[Callable[[str], None]]:
    """A function that prints the pieces of an answer as they come, as `markdown` or as they are; a line break follows
    the last one."""
    if not markdown:
        try:
            yield lambda piece: print(piece, end="", flush=True)
        finally:
            print(flush=True)
        return
    from rich.console import Console  # late, as the spinner's

    from tiermoe.cli.markdown import MarkdownStream

    answer = MarkdownStream(Console())
    try:
        yield answer.add
    finally:
        answer.close()


class ThoughtPrinter:
    """Prints what a model thinks on standard error, dim on a terminal, with a line break before the answer."""

    def __init__(self) -> None:
        self._dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        self._begun = False

    def __enter__(self) -> ThoughtPrinter:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def add(self, text: str) -> None:
        self._begun = True
        shown = "\n".join(map(plain, text.split("\n")))
        print(f"\x1b[2m{shown}\x1b[0m" if self._dim else shown, end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """The answer begins, or nothing follows."""
        if self._begun:
            print("\n", file=sys.stderr, flush=True)
        self._begun = False


@contextlib.contextmanager
def spinner(what: str) -> Iterator[None]:
    """A spinner on a terminal around work of a few seconds; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # late: importing it takes a while, and most calls are not on a terminal

    with Console(stderr=True).status(what):
        yield


@contextlib.contextmanager
def ends_at_once() -> Iterator[None]:
    """Around imports and the reading of headers: Ctrl-C ends the process at once with exit code 130, as nothing has to
    be cleaned up. Libraries swallow a KeyboardInterrupt while they are imported, in `__del__` or in an `except`, and
    are half imported then; raised under pybind11 it aborts the process."""
    main_thread = threading.current_thread() is threading.main_thread()
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or not main_thread:
        yield
        return

    def end(*_: object) -> None:
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), b"\033[?25h\r\033[K")  # the spinner has hidden the cursor
        os._exit(130)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def starting(what: str = "starting") -> Iterator[None]:
    """Imports torch, then runs the block, which imports the modules that need it, or transformers, and reads headers:
    `spinner`, and Ctrl-C ends the process at once."""
    with ends_at_once(), spinner(what):
        import_libraries(own_process=True)
        yield


@contextlib.contextmanager
def progress_bar() -> Iterator[ProgressCall]:
    """A callback (task, done, total) that shows progress and the time left: a bar on a terminal, else `_lines`."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield report


def prompt_progress() -> Callable[[int, int], None]:
    """A callback (tokens read, tokens of the prompt) for the chunks of a prompt: a line on a terminal, which disappears
    when all are read; elsewhere a line every `SECONDS_BETWEEN` until then."""
    terminal, time_left, last = sys.stderr.isatty(), TimeLeft(), time.perf_counter()

    def report(done: int, total: int) -> None:
        nonlocal last
        left, now = time_left(done, total), time.perf_counter()
        text = f"reading the prompt: {done:,} of {total:,} tokens{left}" if done < total else ""
        if terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif text and now - last >= SECONDS_BETWEEN:
            note(text)
            last = now

    return report


class TimeLeft:
    """Time left of a task at its pace since the first call, in words: ', 80 s left'."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def __call__(self, done: int, total: int) -> str:
        """Empty where the pace is not known yet."""
        now = time.perf_counter()
        before, began = self._first = self._first or (done, now)
        if done == before:
            return ""
        left = (total - done) * (now - began) / (done - before)
        return f", {left:.0f} s left" if left < 120 else f", {left / 60:.0f} min left"


def _lines() -> ProgressCall:
    """A callback (task, done, total) that prints a line when a task begins, one every `SECONDS_BETWEEN`, and one when
    it is done."""
    tasks: dict[str, TimeLeft] = {}
    last = 0.0

    def report(what: str, done: int, total: int) -> None:
        nonlocal last
        new, now = what not in tasks, time.perf_counter()
        left = tasks.setdefault(what, TimeLeft())(done, total)
        if new:
            note(f"{what}: {total} to do")
            last = now
        elif done < total and now - last >= SECONDS_BETWEEN:
            note(f"{what}: {done} of {total}{left}")
            last = now
        if done == total:
            note(f"{what}: done")

    return report


def summary(report: Report) -> str:
    """The line printed after an answer."""
    parts = [f"{report.completion_tokens} tokens"]
    if report.decode_tok_s:
        parts.append(f"{report.decode_tok_s:.1f} tok/s")
    if report.bound_tok_s:
        parts.append(f"{report.bound_fraction:.0%} of {BOUND.format(report.bound_tok_s)}")
    parts += [
        f"first token after {report.ttft_s:.2f} s",
        f"hit rate {report.hit_rate:.0%}",
        f"{format_size(report.bytes_read)} read"
        + (f" ({format_size(report.bytes_read_also)} from --also)" if report.bytes_read_also else ""),
        f"kernels {report.kernels}",
        f"peak memory {format_size(report.peak_memory_bytes)} of {format_size(report.memory_budget_bytes)}",
    ]
    if report.guessed_tokens:
        parts.append(f"{report.right_guesses} of {report.guessed_tokens} guesses right")
    if report.displaced_share:
        parts.append(
            f"{report.displaced_share:.0%} of the experts stood in for others ({report.moved_weight_share:.1%} of the "
            f"gate weight)"
        )
    if report.also_warning:
        parts.append(f"--also: {report.also_warning}")
    if report.prefetching:
        parts.append(f"prefetching {report.prefetching}")
    return "[" + ", ".join(parts) + "]"
