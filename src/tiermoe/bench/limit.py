"""A memory cgroup of one's own for a command, with files dropped from the page cache first (Linux, v1 or v2).

The limit counts the page cache that the command faults in, so a file that is mapped and larger than the limit is read
again and again, as on a machine of that size. A page that is cached already counts where it was read first: that is why
files are dropped. The command's swap is limited to none.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiermoe.errors import TiermoeError
from tiermoe.process.system_files import drop_cached


class CannotLimit(TiermoeError):
    """This process may not create a memory cgroup; the message says why and what would allow it."""


@dataclass(frozen=True)
class Hierarchy:
    """Where a child cgroup can be made: its parent ``directory`` in cgroup ``version`` 1 or 2."""

    version: int
    directory: Path


@dataclass(frozen=True)
class Limited:
    """How the command ended; ``peak_bytes`` is the cgroup's own peak (None where the kernel keeps none)."""

    returncode: int
    limit_bytes: int
    peak_bytes: int | None
    oom_kills: int


def find_hierarchy(mountinfo: str, membership: str) -> Hierarchy:
    """Where /proc/self/mountinfo and /proc/self/cgroup allow a child with a memory limit (cgroups(7)).

    In version 1 that is this process's own cgroup. In version 2 a cgroup that holds processes cannot hand
    controllers to children ("no internal processes"), so it is the parent of this process's cgroup.
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


def drop_from_page_cache(files: Iterable[Path]) -> None:
    """Write back and forget the cached pages of each file (posix_fadvise DONTNEED)."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            drop_cached(descriptor)
        finally:
            os.close(descriptor)


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


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[tuple[int, Path]]:
    """A fresh cgroup with ``limit`` bytes as (version, directory), removed on exit. Raises CannotLimit."""
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


def _remove(group: Path) -> None:
    """The kernel may take a moment to let the last process go."""
    for _ in range(50):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)
    print(f"memory limit: could not remove {group}", file=sys.stderr)


def _counter(file: Path, key: str | None = None) -> int | None:
    if not file.exists():
        return None
    text = file.read_text()
    if key is None:
        return int(text)
    return next((int(line.split()[1]) for line in text.splitlines() if line.split()[0] == key), None)


def joining(group: Path, command: Sequence[str]) -> list[str]:
    """A command that enters the cgroup before it becomes `command`, so that all of its memory counts."""
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]


def usage(version: int, group: Path) -> tuple[int | None, int]:
    """(largest memory use in bytes, None where the kernel keeps none; processes killed for memory) of a cgroup."""
    peak = _counter(group / ("memory.max_usage_in_bytes" if version == 1 else "memory.peak"))
    kills = _counter(group / ("memory.oom_control" if version == 1 else "memory.events"), "oom_kill")
    return peak, kills or 0


def run_limited(
    command: Sequence[str], limit: int, drop: Iterable[Path] = (), stdout: int | None = None
) -> tuple[Limited, str]:
    """Run ``command`` with at most ``limit`` bytes: how it ended and, with ``stdout=PIPE``, its output.

    ``drop`` names files to drop from the page cache first. Raises CannotLimit where no cgroup can be made.
    """
    with memory_group(limit) as (version, group):
        drop_from_page_cache(drop)
        done = subprocess.run(joining(group, command), stdout=stdout, text=True, check=False)
        peak, kills = usage(version, group)
    return Limited(done.returncode, limit, peak, kills), done.stdout or ""
