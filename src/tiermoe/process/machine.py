"""What the machine has free, as Linux, macOS and other systems tell it without further packages."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tiermoe.process import windows

_SHARE_OF_ALL = 0.5  # what is taken for free where a system does not say


def available_memory() -> tuple[int, str]:
    """(bytes, where that number comes from): what the system says is available, or what is left of a smaller limit of
    the memory cgroup that the process runs in. Where the system does not say it, a cautious share of all memory."""
    free, source = _system_memory()
    limit = _cgroup_left()
    if limit is not None and limit < free:
        return limit, "left in this control group"
    return free, source


def processors() -> int:
    """Those that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def processor_identity() -> str:
    """The processor's name and what it can do, as far as the system tells: libraries choose their code by it."""
    told = fields_of(Path("/proc/cpuinfo"))
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return " ".join(filter(None, [platform.machine(), platform.processor(), *(told.get(name, "") for name in names)]))


def installed_version(package: str) -> str | None:
    """None where a program runs without having been installed."""
    from importlib.metadata import PackageNotFoundError, version  # late: most starts need neither

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def fields_of(file: Path) -> dict[str, str]:
    """The first value of each 'name: value' line; none where there is no such file."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def page_cache_room(root: Path = Path("/")) -> int:
    """Bytes that could be added to this process's memory and to the page cache together: what the machine has free, and
    what every memory cgroup above the process leaves. Clean pages of files count as free. root: of the file system
    (tests)."""
    return min([_system_memory()[0], *_cgroup_rooms(root)])


def most_memory(root: Path = Path("/")) -> int:
    """Bytes that a process may have at the most: the machine's memory, or the smallest limit of the memory cgroups that
    it runs in. root: of the file system (tests)."""
    limits = (_limit(group, names[0]) for group, names, _ in _cgroups(root))
    return min([total_memory(), *(limit for limit in limits if limit is not None)])


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Limit minus use, pages of files apart, of every memory cgroup around the process that has a limit."""
    for cgroup in _cgroups(root):
        room = _room(*cgroup)
        if room is not None:
            yield room


def _cgroups(root: Path) -> Iterator[tuple[Path, tuple[str, str], str]]:
    """(folder, names of its limit and its use, prefix of its statistics) of every memory cgroup around the process."""
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
            yield group, names, prefix
            if group == top:
                break


def _room(group: Path, names: tuple[str, str], prefix: str) -> int | None:
    limit = _limit(group, names[0])
    if limit is None:
        return None
    try:
        used = int((group / names[1]).read_text())
        pairs = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        stat = {name: int(value) for name, value in pairs}
    except (OSError, ValueError):
        return None
    files = sum(stat.get(f"{prefix}{name}", 0) for name in ("inactive_file", "active_file"))
    return max(limit - used + files, 0)


def _limit(group: Path, name: str) -> int | None:
    """None where there is none."""
    try:
        limit = int((group / name).read_text())  # ValueError for "max"
    except (OSError, ValueError):
        return None
    return limit if limit < 1 << 60 else None


def _system_memory() -> tuple[int, str]:
    for asked in (_linux_available, _macos_available, _windows_available, _posix_available):
        free = asked()
        if free is not None:
            return free, "that the machine has free"
    return int(total_memory() * _SHARE_OF_ALL), (
        f"that are {_SHARE_OF_ALL:.0%} of the machine's memory (what is free it does not say)"
    )


def total_memory() -> int:
    """Bytes of main memory."""
    if sys.platform == "win32":
        return windows.memory(windows.kernel32())[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _linux_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _macos_available() -> int | None:
    """Pages that are free or can be taken at once, as `vm_stat` counts them."""
    if sys.platform != "darwin":
        return None
    try:
        text = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, check=True, timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return vm_stat_available(text)


def vm_stat_available(text: str) -> int | None:
    """Bytes of the free, inactive, speculative and purgeable pages in the output of `vm_stat`; None where it names no
    size of a page or no free ones."""
    size = re.search(r"page size of (\d+) bytes", text)
    pages = {name: int(count) for name, count in re.findall(r"^Pages (\w+):\s+(\d+)\.", text, re.MULTILINE)}
    if size is None or "free" not in pages:
        return None
    return int(size[1]) * sum(pages.get(name, 0) for name in ("free", "inactive", "speculative", "purgeable"))


def _windows_available() -> int | None:
    return windows.memory(windows.kernel32())[0] if sys.platform == "win32" else None


def _posix_available() -> int | None:
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return None
    pages = os.sysconf("SC_AVPHYS_PAGES")
    return pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else None


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
