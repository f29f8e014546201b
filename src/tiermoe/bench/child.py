"""One run in a process of its own: started, bounded, timed out, and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiermoe.bench.limit import CannotLimit, drop_from_page_cache, joining, memory_group, usage
from tiermoe.bench.started import BEGAN
from tiermoe.config import format_size
from tiermoe.errors import TiermoeError

_SIGKILL = 9  # which Windows has no name for


class CaseFailed(TiermoeError):
    """A run that gave no figures; the message is the case's result. `killed`: it needed more memory than it may."""

    def __init__(self, message: str, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


@dataclass(frozen=True, slots=True)
class Bounds:
    """`memory` in bytes, or None for no bound; seconds until the process is ended; `files` dropped from the page cache
    before it starts: all that it reads of the model, where it starts cold or is bounded."""

    memory: int | None
    timeout: float
    files: tuple[Path, ...] = ()


@dataclass(slots=True)
class _Group:
    """The memory cgroup of a run; `directory` None where there is none."""

    version: int = 0
    directory: Path | None = None
    missing: str | None = None


def run_child(command: Sequence[str], bounds: Bounds) -> dict[str, Any]:
    """The JSON object that `command` prints last, with `limited` (whether it ran in a memory cgroup), `limit_missing`
    (why not, where it should) and `cgroup_peak_bytes`. Raises CaseFailed with what people are told."""
    with _group(bounds.memory) as group:
        drop_from_page_cache(bounds.files)
        words = joining(group.directory, command) if group.directory else list(command)
        code, out, err = _communicate(words, bounds.timeout)
        peak, kills = usage(group.version, group.directory) if group.directory else (None, 0)
    if code:
        raise _failure(code, err, kills, bounds.memory if group.directory else None)
    memory = {"limited": group.directory is not None, "limit_missing": group.missing, "cgroup_peak_bytes": peak}
    return {**last_object(out), **memory}


@contextlib.contextmanager
def _group(memory: int | None) -> Iterator[_Group]:
    """A memory cgroup where one is asked for and can be had."""
    with contextlib.ExitStack() as stack:
        group = _Group()
        if memory is not None:
            try:
                group.version, group.directory = stack.enter_context(memory_group(memory))
            except CannotLimit as error:
                group.missing = str(error)
        yield group


def _communicate(words: Sequence[str], timeout: float) -> tuple[int, str, str]:
    """(exit status, standard output, standard error). The process has a group of its own, so that all of it ends where
    it takes too long or this one is interrupted."""
    environment = {**os.environ, BEGAN: str(time.monotonic())}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise CaseFailed(f"timed out: not done after {timeout:g} s; --timeout allows more") from None
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                _kill(process)
            process.communicate()
    return process.returncode, out, err


def _kill(process: subprocess.Popen[str]) -> None:
    """Ends a process and, where the system has groups of processes, all that it started."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def _failure(code: int, err: str, kills: int, limit: int | None) -> CaseFailed:
    if limit is not None and (kills or code == -_SIGKILL):
        return CaseFailed(f"killed: needs more than {format_size(limit)}", killed=True)
    if code < 0:
        said = "; 9 is often the system out of memory" if code == -_SIGKILL else ""
        return CaseFailed(f"its process was ended by signal {-code}{said}", killed=code == -_SIGKILL)
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    return CaseFailed(lines[-1].removeprefix("tiermoe: ") if lines else f"its process ended with status {code}")


def last_object(text: str) -> dict[str, Any]:
    """The JSON object in the last line. CaseFailed where there is none."""
    lines = text.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CaseFailed(f"its process printed no figures but {lines[-1][:80]!r}" if lines else "it printed nothing")
    return found
