"""A short look at the drive: does O_DIRECT pay here, how many lanes, and how fast is it. What it finds is kept in a
small file for the day."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tiermoe.errors import LoadError
from tiermoe.offload.reader import ExtentReader, aligned_memory
from tiermoe.platform.file_io import drop_cached
from tiermoe.platform.json_files import read_json, replace_unlocked
from tiermoe.types import ExpertKey, Extent

SECONDS = 0.08
"""How long each setting is tried at most; the whole probe takes about five times as long."""
_LOOK = 0.01  # seconds of a look that only confirms
_AGREES = 0.4  # of the bandwidth found before; less, or as many times more, and the drive is probed anew
_PAGE_CACHE_LANES = 4  # first reads still come from the drive; 1 to 4 lanes were within the noise from the page cache
_DAY = 86400
_WORTH = 1.1  # more lanes have to be a tenth faster
_BUFFERED_WORTH = 1.5  # copying out of the page cache takes processors from layers: 3 ms for an expert of 2.7 MB


@dataclass(frozen=True, slots=True)
class DriveProbe:
    """How experts are read: `bandwidth` in bytes per second at that setting. `keep`: through the page cache, for the
    next process."""

    direct: bool
    lanes: int
    bandwidth: float
    keep: bool = False


def through_page_cache(extents: Sequence[Extent], lanes: int | None = None) -> DriveProbe:
    """Reading that fills the page cache: nothing is left to choose but the number of lanes, if `lanes` leaves it
    open, so a look of 10 ms at the first extents is enough."""
    lanes = lanes or _PAGE_CACHE_LANES
    return DriveProbe(False, lanes, read_rate(ExtentReader(keep=True), itertools.cycle(extents), 1, _LOOK), keep=True)


def known_drive(extents: Sequence[Extent], lanes: int | None, path: Path) -> DriveProbe:
    """`probe_drive`, or what it has found before on this drive today for extents of this size, kept in `path`: if a
    look of 10 ms does not find the drive much slower or much faster: what was found while others used the drive or the
    processor does not hold for the day."""
    case = _case(extents, lanes)
    kept = _read_kept(path)
    if case in kept:
        probe = kept[case]
        samples = itertools.cycle(_spread(extents))
        if not probe.direct:
            _drop_from_page_cache(extents)  # the look is at the drive
        now = read_rate(ExtentReader(probe.direct), samples, probe.lanes, _LOOK)
        if _AGREES < now / probe.bandwidth < 1 / _AGREES:
            return probe
    probe = probe_drive(extents, lanes)
    entries = {name: asdict(entry) for name, entry in (kept | {case: probe}).items()}
    replace_unlocked(path, json.dumps({"day": _today(), "drives": entries}).encode())
    return probe


def probe_drive(extents: Sequence[Extent], lanes: int | None = None) -> DriveProbe:
    """Reads a sample of `extents` with O_DIRECT in 1, 2 and 4 lanes, then without it, each for `SECONDS` at most.
    `lanes` fixes their number. A sample that cannot be read, or is damaged, is left to whoever needs that expert."""
    samples = itertools.cycle(_spread(extents))
    best = DriveProbe(True, lanes or 1, 0.0)
    for count in (lanes,) if lanes else (1, 2, 4):
        bandwidth = read_rate(ExtentReader(direct=True), samples, count, SECONDS)
        if bandwidth > best.bandwidth * _WORTH:
            best = DriveProbe(True, count, bandwidth)
    _drop_from_page_cache(extents)
    buffered = read_rate(ExtentReader(direct=False), samples, best.lanes, SECONDS)
    if buffered > best.bandwidth * _BUFFERED_WORTH:
        best = DriveProbe(False, best.lanes, buffered)
    return best


def _spread(extents: Sequence[Extent]) -> list[Extent]:
    """The extents in an order that jumps, so that neither read-ahead nor a drive's cache flatters the result."""
    stride = max(1, int(len(extents) * 0.618))
    while len(extents) % stride == 0 and stride > 1:
        stride -= 1
    return [extents[index * stride % len(extents)] for index in range(len(extents))]


def _case(extents: Sequence[Extent], lanes: int | None) -> str:
    """What a probe's result holds for: the drive, the lanes asked for, the size of a read."""
    file = extents[0].segments[0].file
    try:
        device = os.stat(file).st_dev
    except OSError:  # whoever needs the expert says what is wrong
        device = 0
    return f"{device}:{lanes or 'any'}:{extents[0].nbytes}"


def _read_kept(path: Path) -> dict[str, DriveProbe]:
    """What was found today; empty if the file is missing, torn or of another day."""
    try:
        document = read_json(path)
        if document["day"] != _today():
            return {}
        return {case: _checked(entry) for case, entry in document["drives"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _checked(entry: dict[str, object]) -> DriveProbe:
    """ValueError if an entry is none that a probe gives."""
    direct, lanes, bandwidth = entry["direct"], entry["lanes"], entry["bandwidth"]
    if not (isinstance(direct, bool) and isinstance(lanes, int) and isinstance(bandwidth, float)):
        raise ValueError("not a probe's result")
    if not (1 <= lanes <= 64 and bandwidth > 0):
        raise ValueError("not a probe's result")
    return DriveProbe(direct, lanes, bandwidth)


def _today() -> int:
    return int(time.time()) // _DAY


def read_rate(reader: ExtentReader, samples: Iterator[Extent], lanes: int, seconds: float) -> float:
    """Bytes per second that `lanes` threads read together of `samples`, which do not end. Closes the reader."""
    lock = threading.Lock()
    deadline = time.perf_counter() + seconds

    def lane() -> None:
        memory = aligned_memory(0)
        while True:  # once at least: a lane may begin late
            with lock:
                extent = next(samples)
            needed = max(segment.at + segment.nbytes for segment in extent.segments)
            if len(memory) < needed:
                memory = aligned_memory(needed)
            with contextlib.suppress(LoadError):
                reader.read(extent, memory, ExpertKey(-1, -1, 0))
            if time.perf_counter() >= deadline:
                return

    started = time.perf_counter()
    threads = [threading.Thread(target=lane) for _ in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    reader.close()
    return reader.bytes_read / elapsed


def _drop_from_page_cache(extents: Sequence[Extent]) -> None:
    for file in {segment.file for extent in extents for segment in extent.segments}:
        with contextlib.suppress(OSError), open(file, "rb") as handle:
            drop_cached(handle.fileno())
