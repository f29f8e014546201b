"""What the machine has free. Linux; elsewhere what psutil-free means can tell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def available_memory() -> tuple[int, str]:
    """(bytes, where that number comes from): the kernel's estimate of free memory, or what is left of a smaller limit
    of the memory cgroup that the process runs in."""
    free, source = _system_memory(), "that the machine has free"
    limit = _cgroup_left()
    if limit is not None and limit < free:
        return limit, "left in this control group"
    return free, source


def processors() -> int:
    """Those that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def page_cache_room(root: Path = Path("/")) -> int:
    """Bytes that could be added to this process's memory and to the page cache together: what the machine has free, and
    what every memory cgroup above the process leaves. Clean pages of files count as free. root: of the file system
    (tests)."""
    return min([_system_memory(), *_cgroup_rooms(root)])


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Limit minus use, pages of files apart, of every memory cgroup around the process that has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("memory", ""):
            continue
        first = controllers == "memory"  # version 1
        top = root / ("sys/fs/cgroup/memory" if first else "sys/fs/cgroup")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
        prefix = "total_" if first else ""
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            room = _room(group, names, prefix)
            if room is not None:
                yield room
            if group == top:
                break


def _room(group: Path, names: tuple[str, str], prefix: str) -> int | None:
    try:
        limit, used = ((group / name).read_text().strip() for name in names)
        pairs = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        stat = {name: int(value) for name, value in pairs}
    except (OSError, ValueError):
        return None
    if limit == "max" or int(limit) >= 1 << 60:
        return None
    files = sum(stat.get(f"{prefix}{name}", 0) for name in ("inactive_file", "active_file"))
    return max(int(limit) - int(used) + files, 0)


def _system_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_left() -> int | None:
    """Limit minus use of the innermost memory cgroup, version 2 or 1; None where there is no limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            folder, names = (
                Path(f"/sys/fs/cgroup/memory{path}"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            )
        elif controllers == "":
            folder, names = Path(f"/sys/fs/cgroup{path}"), ("memory.max", "memory.current")
        else:
            continue
        try:
            limit, used = ((folder / name).read_text().strip() for name in names)
        except OSError:
            continue
        if limit != "max" and int(limit) < 1 << 60:
            return max(int(limit) - int(used), 0)
    return None
