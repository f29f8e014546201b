"""The machine: its processors, and memory that is free, in all, and within the control groups of the process."""

from __future__ import annotations

import importlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiermoe.errors import ConfigError

_SHARE_OF_ALL = 0.5  # of all memory that counts as free where a system does not say
_NO_LIMIT = 1 << 60  # control groups of version 1 write a number above this where there is no limit


# --- processors and software ---


def processors() -> int:
    """Number of processors that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def processor_name() -> str:
    """The processor's name, as far as the system tells."""
    return fields_of(Path("/proc/cpuinfo")).get("model name") or platform.processor() or platform.machine()


def processor_identity() -> str:
    """The processor's name and its features, as far as the system tells: libraries choose their code by them."""
    cpuinfo = fields_of(Path("/proc/cpuinfo"))
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return " ".join(
        filter(None, [platform.machine(), platform.processor(), *(cpuinfo.get(name, "") for name in names)])
    )


def fields_of(file: Path) -> dict[str, str]:
    """The first value of each 'name: value' line; empty where there is no such file."""
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


def installed_version(package: str) -> str | None:
    """Version of an installed package; None if a program runs without having been installed."""
    from importlib.metadata import PackageNotFoundError, version  # late: most starts need neither

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def require_extra(what: str, extra: str, *modules: str) -> None:
    """ConfigError where one of the modules is not installed. what: needs them. extra: of tiermoe, which has them."""
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what} needs {error.name}: pip install 'tiermoe[{extra}]'") from error


# --- memory ---


def available_memory() -> tuple[int, str]:
    """(bytes available, where the number comes from): what the system reports, or what is left of a smaller limit of
    the innermost memory control group. Where the system does not say it, a cautious share of all memory."""
    free, source = _system_memory()
    limit = _cgroup_left()
    if limit is not None and limit < free:
        return limit, "left in this control group"
    return free, source


def page_cache_room(root: Path = Path("/")) -> int:
    """Bytes that could be added to this process's memory and to the page cache together: what the machine has free, and
    what every memory control group around the process leaves. Clean pages of files count as free. root: of the file
    system (tests)."""
    rooms = (group.room() for group in _cgroups(root))
    return min([_system_memory()[0], *(room for room in rooms if room is not None)])


def most_memory(root: Path = Path("/")) -> int:
    """Bytes that a process may have at the most: the machine's memory, or the smallest limit of the memory control
    groups around the process. root: of the file system (tests)."""
    limits = (group.limit() for group in _cgroups(root))
    return min([total_memory(), *(limit for limit in limits if limit is not None)])


def total_memory() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _system_memory() -> tuple[int, str]:
    for available in (_linux_available, _macos_available, _posix_available):
        free = available()
        if free is not None:
            return free, "that the machine has free"
    return int(total_memory() * _SHARE_OF_ALL), (
        f"that are {_SHARE_OF_ALL:.0%} of the machine's memory (what is free it does not say)"
    )


def _linux_available() -> int | None:
    available = fields_of(Path("/proc/meminfo")).get("MemAvailable")
    return int(available.split()[0]) * 1024 if available else None


def _macos_available() -> int | None:
    if sys.platform != "darwin":
        return None
    try:
        text = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, check=True, timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return vm_stat_available(text)


def vm_stat_available(text: str) -> int | None:
    """Bytes of the free, inactive, speculative and purgeable pages in the output of macOS's `vm_stat`; None if the
    output has no page size or no free pages."""
    size = re.search(r"page size of (\d+) bytes", text)
    pages = {name: int(count) for name, count in re.findall(r"^Pages (\w+):\s+(\d+)\.", text, re.MULTILINE)}
    if size is None or "free" not in pages:
        return None
    return int(size[1]) * sum(pages.get(name, 0) for name in ("free", "inactive", "speculative", "purgeable"))


def _posix_available() -> int | None:
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return None
    pages = os.sysconf("SC_AVPHYS_PAGES")
    return pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else None


# --- control groups ---


@dataclass(frozen=True, slots=True)
class _Cgroup:
    """A memory control group around the process."""

    folder: Path
    first_version: bool  # of the cgroup interface, else the second

    def limit(self) -> int | None:
        """Bytes; None if there is no limit."""
        limit = self._number("memory.limit_in_bytes" if self.first_version else "memory.max")
        return limit if limit is not None and limit < _NO_LIMIT else None

    def used(self) -> int | None:
        """Bytes, with those of cached files; None if they cannot be read."""
        return self._number("memory.usage_in_bytes" if self.first_version else "memory.current")

    def _number(self, name: str) -> int | None:
        try:
            return int((self.folder / name).read_text())  # ValueError for "max"
        except (OSError, ValueError):
            return None

    def left(self) -> int | None:
        """Limit minus use, in bytes; None without a limit."""
        limit, used = self.limit(), self.used()
        return None if limit is None or used is None else max(limit - used, 0)

    def room(self) -> int | None:
        """Limit minus use without cached files, in bytes; None without a limit."""
        limit, used = self.limit(), self.used()
        if limit is None or used is None:
            return None
        prefix = "total_" if self.first_version else ""
        try:
            pairs = (line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
            stat = {name: int(value) for name, value in pairs}
        except (OSError, ValueError):
            return None
        files = sum(stat.get(f"{prefix}{name}", 0) for name in ("inactive_file", "active_file"))
        return max(limit - used + files, 0)


def _cgroup_left() -> int | None:
    """What the innermost memory control group with a limit of its own leaves, in bytes; None if there is none."""
    lefts = (path[0].left() for path in _cgroup_paths(Path("/")))
    return next((left for left in lefts if left is not None), None)


def _cgroups(root: Path) -> Iterator[_Cgroup]:
    """Every memory control group around the process."""
    for path in _cgroup_paths(root):
        yield from path


def _cgroup_paths(root: Path) -> Iterator[list[_Cgroup]]:
    """Memory control groups from the innermost to the root, for each version of the interface that is in use."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("memory", ""):
            continue
        first = controllers == "memory"
        top = root / ("sys/fs/cgroup/memory" if first else "sys/fs/cgroup")
        folder = top / path.lstrip("/")
        inner = [group for group in (folder, *folder.parents) if group.is_relative_to(top)]
        yield [_Cgroup(group, first) for group in inner]
