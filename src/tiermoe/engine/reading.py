"""How a store is read: past the page cache, through it if it has room for all experts besides what is planned, or not
at all: mapped, if that room is enough for the experts themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from tiermoe.engine.budget import holds_everything
from tiermoe.engine.memory_plan import MemoryPlan
from tiermoe.formats.expert_format import PAGE, ExpertFormat
from tiermoe.formats.store import Store, precision_key
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.packing import recipe_key
from tiermoe.model.stored_weights import embedding_bytes
from tiermoe.offload.mapped import MappedFiles
from tiermoe.offload.presets import Resolved
from tiermoe.offload.second_drive import SecondDrive, open_copy
from tiermoe.platform.machine import page_cache_room
from tiermoe.platform.process_memory import resident_bytes
from tiermoe.types import Extent

_ROOM_USED = 0.9  # of the room at most: others need some too


@dataclass(frozen=True, slots=True)
class Reading:
    """How a store is read. `keep`: through the page cache, for the next process. `files`: its files, mapped, if slots
    are their extents; None: slots hold copies. `second`: a second drive, if it has files."""

    keep: bool = False
    files: MappedFiles | None = None
    second: SecondDrive = field(default_factory=SecondDrive)

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        """Gives up what is mapped or open where no engine came to be; an engine does so when it is closed."""
        if failure is not None:
            self.second.reader.close()
            if self.files is not None:
                self.files.close()


@dataclass(frozen=True, slots=True)
class Packed:
    """What is read of a store: the extents of all experts in all precisions, with the format of each layer, and the
    files of the packed dense layers (`dense`). `own`: all lies in the store's own files."""

    extents: Sequence[Extent]
    formats: Sequence[ExpertFormat]
    own: bool
    dense: Sequence[str] = ()


def open_reading(plan: MemoryPlan, store: Store, resolved: Resolved, blueprint: Blueprint, device: str) -> Reading:
    """How the engine of a plan reads what is packed of a model for a device. Files that are mapped are read ahead from
    now on if loading leaves memory for it."""
    packed = _packed(store, resolved, blueprint)
    reading = reading_for(plan, packed, resolved, device)
    if reading.files is not None and plan.loading + plan.experts <= plan.budget:
        reading.files.read_ahead()
    return reading


def reading_for(plan: MemoryPlan, packed: Packed, resolved: Resolved, device: str) -> Reading:
    """Where each expert is read once: mapped, or through the page cache where a second copy of all of them can stay
    there, so that the next process finds them; else, and with a copy on a second drive, past it."""
    also = resolved.settings.also
    if also is None and holds_everything(plan, resolved):
        if device == "cpu" and _can_be_slots(packed, resolved) and _has_room(plan, 0):
            files = MappedFiles()
            with contextlib.suppress(OSError):  # a file system that maps no files: copies do as well
                files.add(_files(packed))
                return Reading(True, files)
        if _has_room(plan, sum(extent.nbytes for extent in packed.extents)):
            return Reading(True)
    return Reading() if also is None else Reading(second=open_copy(also, packed.extents))


def rows_stay_on_disk(blueprint: Blueprint, plan: MemoryPlan, reading: Reading) -> bool:
    """Whether embeddings are left on the drive: their memory is planned for experts, or nothing else is copied
    and reading them whole is what loading would wait for."""
    return plan.embedding_on_disk or (reading.files is not None and embedding_bytes(blueprint) > 0)


def _packed(store: Store, resolved: Resolved, blueprint: Blueprint) -> Packed:
    unit, quantizer = resolved.composition.unit, resolved.settings.quantizer_used
    dense_bits = resolved.settings.dense_bits_used
    dense = recipe_key(blueprint, dense_bits)
    keys = [precision_key(bits, quantizer, unit) for bits in resolved.precisions]
    precisions = [store.precisions[key] for key in keys]
    return Packed(
        [extent for precision in precisions for layer in precision.layers for extent in layer.extents],
        [store.expert_format(key, layer) for key in keys for layer in range(len(store.layers))],
        not any(precision.in_place for precision in precisions),
        store.dense_files(dense) if dense_bits < 16 else (),
    )


def _can_be_slots(packed: Packed, resolved: Resolved) -> bool:
    """Whether kernels can compute from the extents as they lie in the files, and every expert keeps its slot."""
    alike = len({form.layer.experts for form in packed.formats}) == 1  # else a layer may have fewer slots than experts
    return (
        packed.own
        and resolved.composition.unit == "expert"
        and (alike or resolved.composition.allotment == "pool")
        and not any(form.widened for form in packed.formats)
        and all(len(each.segments) == 1 and each.segments[0].offset % PAGE == 0 for each in packed.extents)
    )


def _files(packed: Packed) -> list[str]:
    """In the order in which they are needed."""
    return [*packed.dense, *dict.fromkeys(segment.file for extent in packed.extents for segment in extent.segments)]


def _has_room(plan: MemoryPlan, copies: int) -> bool:
    """Whether the page cache can hold `copies` bytes besides all that the plan names, in the machine and in every
    memory cgroup around the process, with nothing else pushed out."""
    to_come = max(plan.total - resident_bytes(), 0)
    return copies + to_come <= _ROOM_USED * page_cache_room()
