"""What the measurements were taken on, in words and numbers, and what the kernel counted at a drive (Linux)."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from tiermoe import __version__
from tiermoe.bench.limit import CannotLimit, memory_group
from tiermoe.process.bandwidth import last_cache_bytes
from tiermoe.process.machine import fields_of, installed_version, processors, total_memory

_PACKAGES = ("torch", "transformers", "accelerate", "numpy")
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
_LEAST = 1 << 30  # bytes of the cgroup that is tried


def device_bytes_read(folder: Path) -> int | None:
    """Bytes that the block device of `folder` has read since the machine started, for all processes
    (/sys/dev/block/…/stat); None where nobody counts them."""
    number = os.stat(folder).st_dev
    try:
        text = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat").read_text()
    except OSError:
        return None
    return int(text.split()[2]) * 512


def describe() -> dict[str, Any]:
    """CPU, cores that this process may use, memory, versions, and whether memory can be bounded (`no_limit`: why
    not)."""
    info = fields_of(Path("/proc/cpuinfo"))
    flags = set(info.get("flags", "").split())
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "instructions": [flag for flag in _FLAGS if flag in flags],
        "cores": processors(),
        "last_cache_bytes": last_cache_bytes(),
        "memory_bytes": total_memory(),
        "swap_bytes": int(fields_of(Path("/proc/meminfo")).get("SwapTotal", "0").split()[0]) * 1024,
        "system": platform.platform(),
        "python": platform.python_version(),
        "tiermoe": __version__,
        **{package: version for package in _PACKAGES if (version := installed_version(package))},
        "no_limit": _no_limit(),
    }


def _no_limit() -> str | None:
    try:
        with memory_group(_LEAST):
            return None
    except CannotLimit as error:
        return str(error)
