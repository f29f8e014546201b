"""Memory bandwidth of a number of threads, in bytes per second: the best of several streaming reads.

    python -m tiermoe.platform.bandwidth THREADS

torch's sum, dot product and matrix-vector product of float32 read a buffer that is several times as large as the last
cache, five times each. The fastest counts: kernels must not be able to exceed a bound.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

_LEAST_READ, _MOST = 256 << 20, 1 << 30
_CACHES = 8  # times that the buffer is the last cache
_ROUNDS = 5
_COLUMNS = 4096


def last_cache_bytes() -> int | None:
    """Size of the first core's last-level cache; None where Linux does not say."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
    return max(sizes, default=None)


def buffer_bytes(cache: int | None) -> int:
    """Bytes of the buffer that is read, for a last-level cache of `cache` bytes."""
    return min(max(_CACHES * (cache or 0), _LEAST_READ), _MOST)


def measure(threads: int) -> dict[str, Any]:
    """`bandwidth` in bytes per second, `reads`: that of each kind of read, and `buffer_bytes`."""
    import torch

    torch.set_num_threads(threads)
    nbytes = buffer_bytes(last_cache_bytes())
    buffer = torch.ones(nbytes // 4)
    matrix, vector = buffer.view(-1, _COLUMNS), torch.ones(_COLUMNS)
    reads = {"sum": buffer.sum, "dot": lambda: torch.dot(buffer, buffer), "mv": lambda: torch.mv(matrix, vector)}
    found = {name: nbytes / _fastest(read) for name, read in reads.items()}
    return {"bandwidth": max(found.values()), "reads": found, "buffer_bytes": nbytes}


def _fastest(read: Any) -> float:
    read()
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        read()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
