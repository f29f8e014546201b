"""Run a command in a memory cgroup of its own, after dropping files from the page cache (Linux, v1 or v2).

    python -m benchmarks.memory_limit 700M --drop model.gguf -- COMMAND ...

The limit counts the page cache that the command faults in, so a file that is mapped and larger than the limit
is read again and again, as on a machine of that size. The command's swap is limited to none.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class CannotLimit(Exception):
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


def parse_size(text: str) -> int:
    """Bytes of "700M", "2G", "1048576" (powers of 1024; "MiB" means the same)."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:iB|B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size such as 700M or 2G")
    return int(match[1]) * UNITS[match[2].upper()]


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
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
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
    found = find_hierarchy(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
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


def run_limited(
    command: Sequence[str], limit: int, drop: Iterable[Path] = (), stdout: int | None = None
) -> tuple[Limited, str]:
    """Run ``command`` with at most ``limit`` bytes: how it ended and, with ``stdout=PIPE``, its output.

    ``drop`` names files to drop from the page cache first. Raises CannotLimit where no cgroup can be made.
    """
    with memory_group(limit) as (version, group):
        drop_from_page_cache(drop)
        joined = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
        done = subprocess.run(joined, stdout=stdout, text=True, check=False)
        peak = _counter(group / ("memory.max_usage_in_bytes" if version == 1 else "memory.peak"))
        kills = _counter(group / ("memory.oom_control" if version == 1 else "memory.events"), "oom_kill")
    return Limited(done.returncode, limit, peak, kills or 0), done.stdout or ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_limit", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("limit", type=parse_size, help="such as 700M or 2G")
    parser.add_argument("--drop", type=Path, action="append", default=[], help="file to drop from the page cache")
    parser.add_argument("command", nargs="+", help="the command, after --")
    args = parser.parse_args()
    try:
        result, _ = run_limited(args.command, args.limit, args.drop)
    except CannotLimit as error:
        sys.exit(f"memory limit: {error}")
    print(json.dumps(asdict(result)), file=sys.stderr)
    sys.exit(result.returncode if result.returncode >= 0 else 128 - result.returncode)


if __name__ == "__main__":
    main()
