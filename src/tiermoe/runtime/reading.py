"""How experts are read: past the page cache, or through it where it has room for all of them beside what is planned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tiermoe.runtime.composition import Resolved
from tiermoe.runtime.footprint import resident_bytes
from tiermoe.runtime.memory_plan import MemoryPlan
from tiermoe.runtime.system import page_cache_room
from tiermoe.tiers.probe import DriveProbe, known_drive, through_page_cache
from tiermoe.types import Extent

_ROOM_USED = 0.9  # of the room at most: others need some too


def drive_for(plan: MemoryPlan, extents: Sequence[Extent], resolved: Resolved, root: Path) -> DriveProbe:
    """How the experts at `extents` are read from the store at `root`: through the page cache where each is read once
    and a copy of all of them can stay there, so that the next process finds them; else as the drive is fastest."""
    lanes = resolved.settings.lanes
    everything = plan.slots >= plan.all_slots and len(resolved.precisions) == 1
    if everything and resolved.composition.store == "disk" and has_room(plan, extents):
        return through_page_cache(extents, lanes)
    return known_drive(extents, lanes, root / "drive.json")


def has_room(plan: MemoryPlan, extents: Sequence[Extent]) -> bool:
    """Whether the page cache can hold the extents beside all that the plan names, in the machine and in every memory
    cgroup around the process, with nothing else pushed out."""
    to_come = max(plan.total - resident_bytes(), 0)
    return sum(extent.nbytes for extent in extents) + to_come <= _ROOM_USED * page_cache_room()
