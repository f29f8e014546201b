"""Puts the tiers of a device together: slots, and the link that fills them. Nobody else knows which."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tiermoe.decide.link import Link
from tiermoe.store.layout import ExpertFormat
from tiermoe.tiers.cuda import CudaCopier, peak_memory
from tiermoe.tiers.disk import DiskLink, SlotFiller, Slots
from tiermoe.tiers.gpu import GpuLink
from tiermoe.tiers.mapped import MappedFiles, MappedReader, MappedSlots
from tiermoe.tiers.slots import DeviceSlots, HostSlots, SlotRuns
from tiermoe.types import ExpertKey, Extent


class MeteredLink(Link, Protocol):
    """A link that counts what it did. `wait_s`: seconds the caller waited; `busy_s`: seconds in which it was
    reading; `bytes_read`: bytes from the drive."""

    wait_s: float

    @property
    def busy_s(self) -> float: ...

    @property
    def bytes_read(self) -> int: ...

    def roll_back(self) -> None:
        """After an interruption of its caller anywhere: drops what is queued, waits for what is under way and forgets
        what nobody has taken. Nothing is in its slots for sure but what was taken before."""

    def close(self) -> None:
        """Ends the link's threads, drops what is queued and gives the slots back."""


def _no_more() -> dict[str, int | str]:
    return {}


@dataclass(frozen=True, slots=True)
class Tiers:
    """The slots that kernels compute from, and the link that fills them. `stats`: a GPU's own counters."""

    slots: Slots
    link: MeteredLink
    stats: Callable[[], dict[str, int | str]] = field(default=_no_more)


def assemble(
    sizes: Sequence[tuple[int, int]],
    filler: SlotFiller,
    lanes: int,
    bytes_of: Callable[[ExpertKey], int],
    device: str = "cpu",
    pinned: Sequence[tuple[Sequence[int], int, int]] = (),
) -> Tiers:
    """Disk → slots in main memory, filled by `lanes` threads. sizes: (count, bytes) of each run of equal slots,
    numbered one run after the other. bytes_of: bytes of an expert in its slot. For a GPU: disk → pinned slots → slots
    on the GPU; pinned: (the bits of the experts that lie there, count, bytes) of each run. BudgetError where memory is
    refused."""
    if device == "cpu":
        slots = SlotRuns([HostSlots(count, nbytes) for count, nbytes in sizes if count])
        return Tiers(slots, DiskLink(filler, slots, lanes))
    on_device = SlotRuns([DeviceSlots(count, nbytes, device) for count, nbytes in sizes if count])
    link = GpuLink(filler, _pinned(pinned), on_device, bytes_of, CudaCopier(device), lanes)
    return Tiers(on_device, link, lambda: _gpu_stats(device, link))


def _pinned(runs: Sequence[tuple[Sequence[int], int, int]]) -> dict[int, HostSlots]:
    """Bits → the slots of experts at so many. BudgetError where one run is refused; the others are given back."""
    slots: dict[int, HostSlots] = {}
    with contextlib.ExitStack() as undo:
        for bits, count, nbytes in runs:
            run = HostSlots(count, nbytes, pin=True)
            undo.callback(run.close)
            slots |= dict.fromkeys(bits, run)
        undo.pop_all()
    return slots


def assemble_mapped(
    files: MappedFiles,
    count: int,
    extent_of: Callable[[ExpertKey], Extent],
    format_of: Callable[[ExpertKey], ExpertFormat],
    lanes: int,
) -> Tiers:
    """`count` slots that are extents of `files`; `lanes` threads bring them in and verify them."""
    slots = MappedSlots(count, files, extent_of)
    return Tiers(slots, DiskLink(SlotFiller(MappedReader(), extent_of, format_of), slots, lanes))


def _gpu_stats(device: str, link: GpuLink) -> dict[str, int | str]:
    return {
        "device": device,
        "peak_gpu_memory_bytes": peak_memory(device),
        "bytes_copied": link.bytes_copied,
        "host_hits": link.host.hits,
        "host_misses": link.host.misses,
    }
