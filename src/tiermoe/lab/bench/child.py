"""A run in a process of its own: started, bounded in memory and time, and the JSON object that it prints last.

Memory is bounded by a fresh cgroup (Linux, v1 or v2) without swap. The cgroup counts the page cache that its processes
fault in, so a mapped file larger than the limit is read again and again, as on a machine of that size. A page that is
cached already counts where it was first read: that is why a run's files are dropped from the page cache before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiermoe.config import format_size
from tiermoe.errors import TiermoeError
from tiermoe.lab.bench.run_peer import BEGAN
from tiermoe.platform.file_io import drop_cached

_REMOVING_TRIES, _REMOVING_WAIT_S = 50, 0.1  # the kernel may take a moment to let a cgroup's last process go


class CannotLimit(TiermoeError):
    """This process may not create a memory cgroup; the message says why and what would allow it."""


class CaseFailed(TiermoeError):
    """A run that gave no figures; the message is the case's result. `killed`: it needed more memory than allowed."""

    def __init__(self, message: str, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a run may use."""

    memory: int | None  # bytes; None: no bound
    timeout: float  # seconds until the process is ended
    files: tuple[Path, ...] = ()  # dropped from the page cache before the start


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where a child cgroup can be made."""

    version: int  # 1 or 2
    directory: Path  # the parent of the child


def run_child(command: Sequence[str], bounds: Bounds) -> dict[str, Any]:
    """The JSON object that `command` prints last, with `limited` (whether it ran in a memory cgroup), `limit_missing`
    (why not, where it should) and `cgroup_peak_bytes`. CaseFailed with the reason where there is none."""
    with contextlib.ExitStack() as stack:
        group, missing = None, None
        if bounds.memory is not None:
            try:
                group = stack.enter_context(memory_group(bounds.memory))
            except CannotLimit as error:
                missing = str(error)
        drop_from_page_cache(bounds.files)
        words = joining(group[1], command) if group else list(command)
        code, out, err = _communicate(words, bounds.timeout)
        peak, kills = usage(*group) if group else (None, 0)
    if code:
        raise _failure(code, err, kills, bounds.memory if group else None)
    return {**last_object(out), "limited": group is not None, "limit_missing": missing, "cgroup_peak_bytes": peak}


def _communicate(words: Sequence[str], timeout: float) -> tuple[int, str, str]:
    """(exit status, standard output, standard error). The process leads a session of its own, so that all that it
    started ends with it where it takes too long or this process is interrupted."""
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
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, out, err


def _failure(code: int, err: str, kills: int, limit: int | None) -> CaseFailed:
    if limit is not None and (kills or code == -signal.SIGKILL):
        return CaseFailed(f"killed: needs more than {format_size(limit)}", killed=True)
    if code < 0:
        said = "; 9 is often the system out of memory" if code == -signal.SIGKILL else ""
        return CaseFailed(f"its process was ended by signal {-code}{said}", killed=code == -signal.SIGKILL)
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


def drop_from_page_cache(files: Iterable[Path]) -> None:
    """Writes back and forgets the cached pages of each file (posix_fadvise DONTNEED)."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            drop_cached(descriptor)
        finally:
            os.close(descriptor)


def find_hierarchy(mountinfo: str, membership: str) -> Hierarchy:
    """Where /proc/self/mountinfo and /proc/self/cgroup allow a child with a memory limit (cgroups(7)). CannotLimit
    where they do not.

    In version 1 that is this process's own cgroup. In version 2 a cgroup that holds processes cannot hand controllers
    to children ("no internal processes"), so it is the parent of this process's cgroup.
    """
    paths = {}
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    mounts = {}
    for line in mountinfo.splitlines():
        before, after = line.split(" - ", 1)
        root, mount = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            mounts[""] = (root, mount)
        elif kind == "cgroup" and "memory" in options.strip().split(","):
            mounts["memory"] = (root, mount)
    for version, controller in ((1, "memory"), (2, "")):
        if controller in mounts and controller in paths:
            root, mount = mounts[controller]
            inside = paths[controller].removeprefix(root.rstrip("/")).strip("/")
            own = Path(mount) / inside
            return Hierarchy(version, own if version == 1 or own == Path(mount) else own.parent)
    raise CannotLimit("no cgroup file system with a memory controller is mounted here")


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[tuple[int, Path]]:
    """A fresh cgroup with `limit` bytes as (version, directory), removed on exit. Raises CannotLimit."""
    try:
        found = find_hierarchy(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    except OSError as error:
        raise CannotLimit("this system has no memory cgroups (Linux has them)") from error
    group = found.directory / f"memory-limit-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group.mkdir()
    except OSError as error:
        raise CannotLimit(
            f"cannot create a cgroup in {found.directory} ({error.strerror}): run as root, or inside "
            "'systemd-run --user --scope -p Delegate=yes'"
        ) from error
    try:
        try:
            _set_limit(found.version, group, limit)
        except OSError as error:
            raise CannotLimit(
                f"cgroup v{found.version} at {found.directory} takes no memory limit ({error.strerror}): "
                "its memory controller is not handed to children"
            ) from error
        yield found.version, group
    finally:
        _remove(group)


def _set_limit(version: int, group: Path, limit: int) -> None:
    if version == 1:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        with_swap = group / "memory.memsw.limit_in_bytes"
        if with_swap.exists():
            with_swap.write_text(str(limit))
    else:
        (group / "memory.max").write_text(str(limit))
        swap = group / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")


def _remove(group: Path) -> None:
    for _ in range(_REMOVING_TRIES):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(_REMOVING_WAIT_S)
    print(f"memory limit: could not remove {group}", file=sys.stderr)


def joining(group: Path, command: Sequence[str]) -> list[str]:
    """A command that enters the cgroup before it becomes `command`, so that all of its memory counts."""
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]


def usage(version: int, group: Path) -> tuple[int | None, int]:
    """(largest memory use in bytes, None where the kernel keeps none; processes killed for memory) of a cgroup."""
    peak = group / ("memory.max_usage_in_bytes" if version == 1 else "memory.peak")
    events = group / ("memory.oom_control" if version == 1 else "memory.events")
    counts = dict(line.split()[:2] for line in events.read_text().splitlines()) if events.exists() else {}
    return int(peak.read_text()) if peak.exists() else None, int(counts.get("oom_kill", 0))
