"""Puts the tiers of a device together: slots, and the link that fills them. Nobody else knows which."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.native import available
from tiermoe.offload.cuda import CudaCopier, peak_memory
from tiermoe.offload.disk import DiskLink, NativeDiskLink, SlotFiller
from tiermoe.offload.gpu import GpuLink
from tiermoe.offload.link import MeteredLink
from tiermoe.offload.mapped import MappedFiles, MappedReader, MappedSlots
from tiermoe.offload.reader import ExtentReader
from tiermoe.offload.slots import DeviceSlots, FilledSlots, HostSlots, SlotRuns, Slots
from tiermoe.types import ExpertKey, Extent


@dataclass(frozen=True, slots=True)
class Tiers:
    """The slots that kernels compute from, and the link that fills them. `stats`: a GPU's own counters."""

    slots: Slots
    link: MeteredLink
    stats: Callable[[], dict[str, int | str]] = dict


def assemble(
    sizes: Sequence[tuple[int, int, bool]],
    filler: SlotFiller,
    lanes: int,
    bytes_of: Callable[[ExpertKey], int],
    device: str = "cpu",
    pinned: Sequence[tuple[Sequence[int], int, int]] = (),
) -> Tiers:
    """Disk → slots in main memory, filled by `lanes` threads. sizes: (count, bytes, whether they share fewer bytes) of
    each run of equal slots, numbered one run after the other. bytes_of: bytes of an expert in its slot. For a GPU: disk
    → pinned slots → slots on the GPU; pinned: (the bits of the experts that lie there, count, bytes) of each run.
    BudgetError where memory is refused."""
    if device == "cpu":
        slots = SlotRuns([HostSlots(count, nbytes, shared=shared) for count, nbytes, shared in sizes if count])
        return Tiers(slots, _disk_link(filler, slots, lanes))
    on_device = SlotRuns([DeviceSlots(count, nbytes, device) for count, nbytes, _ in sizes if count])
    link = GpuLink(filler, _pinned(pinned), on_device, bytes_of, CudaCopier(device), lanes)
    return Tiers(on_device, link, lambda: _gpu_stats(device, link))


def _disk_link(filler: SlotFiller, slots: FilledSlots, threads: int) -> DiskLink | NativeDiskLink:
    """Native threads where there are kernels and the filler reads whole experts as they are stored."""
    reader = filler.reader
    if filler.reads_as_stored and available() and isinstance(reader, ExtentReader):
        return NativeDiskLink(reader, slots, filler.extent_of, filler.format_of, threads)
    return DiskLink(filler, slots, threads)


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
    if available():
        return Tiers(slots, NativeDiskLink(ExtentReader(keep=True), slots, extent_of, format_of, lanes, mapped=True))
    return Tiers(slots, DiskLink(SlotFiller(MappedReader(), extent_of, format_of), slots, lanes))


def _gpu_stats(device: str, link: GpuLink) -> dict[str, int | str]:
    return {
        "device": device,
        "peak_gpu_memory_bytes": peak_memory(device),
        "bytes_copied": link.bytes_copied,
        "host_hits": link.host.hits,
        "host_misses": link.host.misses,
    }
