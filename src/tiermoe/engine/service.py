"""The experts of one loaded model on their way: the store they lie in, the slots they come to, the link between, the
scheduler that decides what comes, and what earlier runs have found."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tiermoe.engine.budget import shape_of
from tiermoe.engine.memory_plan import MemoryPlan
from tiermoe.engine.reading import Reading
from tiermoe.engine.units import LayerKernels, unit_of
from tiermoe.formats.expert_format import ExpertFormat, Layout
from tiermoe.formats.store import Store, precision_key
from tiermoe.formats.store_files import hold
from tiermoe.kernels.experts import Views
from tiermoe.model.moe import ExpertGate
from tiermoe.native import available
from tiermoe.offload.assembly import PrecisionSlots, assemble
from tiermoe.offload.cuda import CudaCopier, peak_memory, resolve_device
from tiermoe.offload.disk import DiskLink, NativeDiskLink, SlotFiller, few_lanes, most_lanes
from tiermoe.offload.gpu import GpuLink
from tiermoe.offload.lanes import Lanes
from tiermoe.offload.link import MeteredLink
from tiermoe.offload.mapped import MappedFiles, MappedReader, MappedSlots
from tiermoe.offload.policies.prediction import HashTable
from tiermoe.offload.policies.prefetch_trial import PrefetchTrial, promising
from tiermoe.offload.presets import Resolved
from tiermoe.offload.reader import ExtentReader, HeldReader
from tiermoe.offload.scheduler import Scheduler
from tiermoe.offload.second_drive import TwoDrives
from tiermoe.offload.slots import DeviceSlots, FilledSlots, HostSlots, SlotRuns, Slots
from tiermoe.offload.usage import (
    RunRecord,
    SizeCurve,
    Uses,
    merged,
    most_used,
    read_record,
    record_path,
    write_record,
)
from tiermoe.platform.machine import processors
from tiermoe.platform.process_memory import free_pages
from tiermoe.types import ExpertKey, Extent

_CASES = 16  # circumstances of which it is kept whether prefetching paid, the newest


class ExpertService:
    """Brings experts into slots. hash_tables: MoE layer → token id → its experts, of the layers that have one."""

    def __init__(
        self,
        store: Store,
        plan: MemoryPlan,
        resolved: Resolved,
        reading: Reading,
        hash_tables: Mapping[int, HashTable],
    ) -> None:
        self.store, self.plan, self.resolved = store, plan, resolved
        self._held = hold(store.root)
        self.hash_layers = tuple(sorted(hash_tables))
        self.device = resolve_device(resolved.settings.device)
        known: dict[Layout, Layout] = {}
        self.packed = {bits: PackedExperts(store, self._key_of(bits), known) for bits in resolved.precisions}
        self.keep, self._files, self.second = reading.keep, reading.files, reading.second
        self.unit = unit_of(resolved.composition, torch.device(self.device).type)
        tiers = self._tiers(reading.files)
        self._slots, self.link, self.tier_stats = tiers.slots, tiers.link, tiers.stats
        self._views: dict[int, tuple[Layout, Views]] = {}  # by slot: of the layout that it was last used with
        self.history = history = self._earlier_runs() if resolved.settings.warm else None
        with contextlib.ExitStack() as undo:  # of a composition that does not fit the model
            undo.callback(tiers.link.close)
            self.unit.over(tiers.link)
            self.scheduler = self._schedule(hash_tables, self._trial(history))
            undo.pop_all()
        if history is not None:
            self.scheduler.fill(history.uses)
            if isinstance(tiers.link, GpuLink):
                tiers.link.fill(self._for_main_memory(history.uses))
        self._leave_record = history.keep(self, self.scheduler) if history is not None else None

    @property
    def bandwidth(self) -> float:
        """`LinkCounters.bandwidth`."""
        return self.link.counters().bandwidth

    @property
    def wait_s(self) -> float:
        """Seconds in which the computing thread waited for experts, or parts of them."""
        return self.link.counters().wait_s + self.unit.wait_s

    def experts(self, index: int, gate: ExpertGate) -> LayerKernels:
        """What computes the experts of MoE layer `index`."""
        formats = {bits: packed.formats[index] for bits, packed in self.packed.items()}
        return self.unit.experts(index, gate, formats, self._views_of)

    @property
    def mapped(self) -> bool:
        """Whether slots are extents of the store's files, mapped."""
        return self._files is not None

    def lend(self, chunks: int, tokens: int, scored: bool) -> bool:
        """Frees slots' memory for a step until the cache takes it back (`ExpertCache.take_back`); whether it has to.
        chunks: of a prompt, which one pass over a layer computes. scored: the step computes logits of a prompt's
        tokens."""
        count = self.plan.lent(chunks, large=scored or tokens >= self.plan.large_step)
        if count:
            for slot in self.scheduler.loader.lend(count, self.plan.layer_slots):
                self._free_slot(slot)
        return count > 0

    def before_step(self, interrupted: bool) -> None:
        """interrupted: the step before was, anywhere; then nothing is under way any more, and what is resident stays.
        LoadError if a file that is mapped was cut short."""
        if self._files is not None:
            self._files.check()
        if not interrupted:
            return
        self.unit.roll_back()
        self.link.roll_back()
        self.scheduler.roll_back()

    def close(self) -> None:
        """Ends the reading lanes and gives the slots back."""
        if self._leave_record is not None:
            self.scheduler.record_hits()
            self._leave_record()
        self.unit.close()
        self.link.close()
        self._views.clear()
        del self._slots
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _tiers(self, files: MappedFiles | None) -> Tiers:
        settings = self.resolved.settings
        if files is not None:
            return mapped_tiers(files, self.plan.slots, self._extent_of, self._format_of, few_lanes(settings))
        formats = [form for packed in self.packed.values() for form in packed.formats]
        return tiers_of(
            [(pool.addresses, pool.slot_bytes, bool(pool.sizes)) for pool in self.plan.pools],
            self._filler(),
            few_lanes(settings),
            lambda key: self._format_of(key).slot.nbytes,
            self.device,
            [(pool.bits, pool.slots, pool.slot_bytes) for pool in self.plan.host_pools],
            Lanes(most_lanes(settings, formats)) if settings.lanes is None and not self.keep else None,
            self.unit.gpu_link(formats, self.plan.layer_slots) if self.device != "cpu" else GpuLink,
        )

    def _filler(self) -> SlotFiller:
        as_stored = not any(form.widened for packed in self.packed.values() for form in packed.formats)
        return self.unit.filler(self._reader(), self._extent_of, self._format_of, as_stored)

    def _extent_of(self, key: ExpertKey) -> Extent:
        return self.packed[key.bits].extents[key.layer][key.expert]

    def _format_of(self, key: ExpertKey) -> ExpertFormat:
        return self.packed[key.bits].of[key.layer][key.expert]

    def _reader(self) -> ExtentReader | HeldReader:
        if self.second.files:
            return TwoDrives(self.second)
        reader = ExtentReader(keep=self.keep)
        if self.resolved.composition.store == "disk":
            return reader
        places = (
            ExpertKey(layer, expert, bits)
            for bits, packed in self.packed.items()
            for layer, extents in enumerate(packed.extents)
            for expert in range(len(extents))
        )
        return HeldReader(reader, ((key, self._extent_of(key)) for key in places))

    def _key_of(self, bits: int) -> str:
        settings, unit = self.resolved.settings, self.resolved.composition.unit
        return precision_key(bits, settings.quantizer_used, unit)

    def _schedule(self, hash_tables: Mapping[int, HashTable], trial: PrefetchTrial) -> Scheduler:
        shape = replace(shape_of(self.store.layers), hash_tables=hash_tables, drafting=self.store.drafting)
        slots = [PrecisionSlots(pool.bits, pool.slots, pool.sizes) for pool in self.plan.pools]
        scheduler = assemble(
            self.resolved.composition, shape, slots, self.link, self.resolved.settings.bits_used, self.resolved.tables,
            miss_costs=self.unit.miss_costs, trial=lambda: trial,
        )  # fmt: skip
        scheduler.loader.launches = self.device != "cpu"
        if any(pool.sizes for pool in self.plan.pools):
            scheduler.loader.cache.on_shrink = self._free_slot
        return scheduler

    def _for_main_memory(self, uses: Sequence[Sequence[float]]) -> list[ExpertKey]:
        """What main memory is filled with before a GPU: all experts if it has a slot for each, else those that earlier
        runs used, most used first. uses: theirs, a row of experts for each layer; empty if nothing is known."""
        experts, table = [layer.experts for layer in self.store.layers], self.resolved.tables.bits
        on_the_way, found = self.scheduler.loader.cache.in_flight, list[ExpertKey]()
        for bits in self.resolved.precisions:
            ranked = most_used(experts, bits, uses, everything=True)
            keys = [key for key in ranked if table.get((key.layer, key.expert), bits) == bits]
            slots = sum(pool.slots for pool in self.plan.host_pools if bits in pool.bits)
            if slots < len(keys):
                keys = [key for key in keys if uses and uses[key.layer][key.expert]]
            found += [key for key in keys if key not in on_the_way]
        return found

    def _free_slot(self, slot: int, kept: int = 0) -> None:
        """Gives the memory of a slot back, after its first `kept` bytes."""
        memory = self._slots.buffer(slot)[kept:]
        free_pages(memory.data_ptr(), memory.nbytes)

    def _earlier_runs(self) -> History:
        share, prefetch = round(20 * self.plan.slots / self.plan.all_slots) * 5, self.resolved.composition.prefetch
        circumstances = f"prefetch={prefetch}, {share} % of the experts, {torch.get_num_threads()} threads"
        return History(self.store, self._key_of(self.resolved.precisions[0]), circumstances)

    def _trial(self, history: History | None) -> PrefetchTrial:
        link, slot_bytes = self.link, self.plan.slot_bytes  # not the service: the history's end waits for it
        spare = processors() > torch.get_num_threads()

        def promises(layer_s: float) -> bool:
            bandwidth = link.counters().bandwidth
            return promising(layer_s, slot_bytes / bandwidth if bandwidth else math.inf, spare)

        return history.trial(promises) if history is not None else PrefetchTrial(None, promises)

    def _views_of(self, key: ExpertKey, slot: int) -> Views:
        layout = self.packed[key.bits].layouts[key.layer][key.expert]
        before, views = self._views.get(slot, (None, None))
        if views is None or before is not layout:
            views = self.unit.views(self._format_of(key), self._slots.buffer(slot))
            self._views[slot] = layout, views
        return views


class PackedExperts:
    """One precision of a store, by layer and expert: `extents`, formats (`of`) and `layouts` of slots, one object for
    all that are alike. `formats`: of each layer's first expert. known: layouts that others have."""

    def __init__(self, store: Store, key: str, known: dict[Layout, Layout]) -> None:
        layers = store.precisions[key].layers
        self.extents = [layer.extents for layer in layers]
        self.of = [store.expert_formats(key, index) for index in range(len(layers))]
        self.formats = [forms[0] for forms in self.of]
        self.layouts = [[known.setdefault(form.slot, form.slot) for form in forms] for forms in self.of]


@dataclass(frozen=True, slots=True)
class Tiers:
    """The slots that kernels compute from, and the link that fills them. `stats`: a GPU's own counters."""

    slots: Slots
    link: MeteredLink
    stats: Callable[[], dict[str, float | str]] = dict


def tiers_of(
    sizes: Sequence[tuple[int, int, bool]],
    filler: SlotFiller,
    lanes: int,
    bytes_of: Callable[[ExpertKey], int],
    device: str = "cpu",
    pinned: Sequence[tuple[Sequence[int], int, int]] = (),
    learned: Lanes | None = None,
    gpu_link: Callable[..., GpuLink] = GpuLink,
) -> Tiers:
    """Disk → slots in main memory, filled by `lanes` threads, or by as many native ones as `learned` finds. sizes:
    (count, bytes, whether they share fewer bytes) of each run of equal slots, numbered one run after the other.
    bytes_of: bytes of an expert in its slot. For a GPU: disk → pinned slots → slots on the GPU; pinned: (the bits of
    the experts that lie there, count, bytes) of each run; gpu_link: makes the link, as `GpuLink` does. BudgetError if
    memory is refused."""
    if device == "cpu":
        slots = SlotRuns([HostSlots(count, nbytes, shared=shared) for count, nbytes, shared in sizes if count])
        return Tiers(slots, _disk_link(filler, slots, lanes, learned))
    copier = CudaCopier(device)  # before memory is pinned, which an error would leave so
    on_device = SlotRuns([DeviceSlots(count, nbytes, device) for count, nbytes, _ in sizes if count])
    host = _pinned(pinned)
    with contextlib.ExitStack() as undo:
        for run in set(host.values()):
            undo.callback(run.close)
        link = gpu_link(filler, host, on_device, bytes_of, copier, lanes)
        undo.pop_all()
    return Tiers(on_device, link, lambda: _gpu_stats(device, link))


def _disk_link(
    filler: SlotFiller, slots: FilledSlots, threads: int, learned: Lanes | None
) -> DiskLink | NativeDiskLink:
    """Native threads where there are kernels and the filler reads whole experts as they are stored."""
    reader = filler.reader
    if filler.reads_as_stored and available() and isinstance(reader, ExtentReader):
        return NativeDiskLink(reader, slots, filler.extent_of, filler.format_of, learned or threads)
    return DiskLink(filler, slots, threads)


def _pinned(runs: Sequence[tuple[Sequence[int], int, int]]) -> dict[int, HostSlots]:
    """Bits → the slots of experts at so many. BudgetError if one run is refused; the others are given back."""
    slots: dict[int, HostSlots] = {}
    with contextlib.ExitStack() as undo:
        for bits, count, nbytes in runs:
            run = HostSlots(count, nbytes, pin=True)
            undo.callback(run.close)
            slots |= dict.fromkeys(bits, run)
        undo.pop_all()
    return slots


def mapped_tiers(
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


def _gpu_stats(device: str, link: GpuLink) -> dict[str, float | str]:
    now = link.counters()
    return {
        "device": device,
        "peak_gpu_memory_bytes": peak_memory(device),
        "bytes_copied": now.bytes_copied,
        "copy_s": now.copy_s,
        "read_bandwidth": now.read_bandwidth,
        "host_experts": len(link.host),
        "host_hits": link.host.hits,
        "host_misses": link.host.misses,
    }


class History:
    """The record of the precision `key` in a store. circumstances: in which prefetching is measured, as text."""

    def __init__(self, store: Store, key: str, circumstances: str) -> None:
        self._path = record_path(store.root, f"{key}-mtp" if store.drafting else key)
        self._fingerprint = store.source.fingerprint
        self._experts = [layer.experts for layer in store.layers]
        self._circumstances = circumstances
        self._record = self._read()
        self._curve: SizeCurve | None = None

    @property
    def uses(self) -> Sequence[Sequence[float]]:
        """Of each layer's experts in earlier runs; empty if nothing is known."""
        return self._record.uses

    def trial(self, promises: Callable[[float], bool]) -> PrefetchTrial:
        """A trial of prefetching that begins with what earlier runs have found; promises: as there."""
        return PrefetchTrial(self._record.prefetching.get(self._circumstances), promises)

    def record(self, curve: SizeCurve) -> None:
        """What this run says of other sizes of the cache, by now."""
        self._curve = curve

    def keep(self, owner: object, scheduler: Scheduler) -> Callable[[], object]:
        """Writes down what `scheduler` has seen when `owner` ends, or the interpreter does, or the result is called:
        once."""
        return weakref.finalize(owner, self._write, scheduler.uses, scheduler.trial)

    def _read(self) -> RunRecord:
        return read_record(self._path, self._fingerprint, self._experts)

    def _write(self, uses: Uses, trial: PrefetchTrial | None) -> None:
        if not any(map(any, uses.counts)):
            return
        record = self._read()  # another process may have written meanwhile
        record.uses = merged(record.uses, uses.counts)
        if trial is not None and trial.pays is not None:
            record.prefetching.pop(self._circumstances, None)
            record.prefetching[self._circumstances] = trial.pays
            record.prefetching = dict(list(record.prefetching.items())[-_CASES:])
        record.curve = self._curve or record.curve
        write_record(self._path, self._fingerprint, record)
