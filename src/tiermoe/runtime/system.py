"""What the machine has free. Linux; elsewhere what psutil-free means can tell."""

from __future__ import annotations

import os
from pathlib import Path


def available_memory() -> tuple[int, str]:
    """(bytes, where that number comes from): the kernel's estimate of free memory, or what is left of a smaller limit
    of the memory cgroup that the process runs in."""
    free, source = _system_memory(), "that the machine has free"
    limit = _cgroup_left()
    if limit is not None and limit < free:
        return limit, "left in this control group"
    return free, source


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
