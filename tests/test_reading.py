"""How experts are read: past the page cache or through it, and by how many threads."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from extent_files import EXPERTS, FORM, SIZE, write_experts
from tiermoe.config import Settings
from tiermoe.engine import reading
from tiermoe.engine.memory_plan import MemoryPlan
from tiermoe.engine.reading import Packed, Reading
from tiermoe.offload.presets import Resolved, compose
from tiermoe.offload.profiles import Tables
from tiermoe.offload.reader import ExtentReader, aligned_memory
from tiermoe.platform.machine import most_memory, page_cache_room, total_memory
from tiermoe.types import ExpertKey, Need, Phase

GIB = 1 << 30


def write_group(root: Path, version: int, path: str, limit: str, used: int, files: int) -> None:
    top = root / ("sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup")
    folder = top / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    prefix = "total_" if version == 1 else ""
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{prefix}inactive_file {files}\n{prefix}active_file 5\n")


def in_group(root: Path, version: int, path: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    line = f"4:memory:{path}" if version == 1 else f"0::{path}"
    (root / "proc/self/cgroup").write_text(f"9:name=systemd:/\n{line}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_every_group_above_the_process_counts_and_pages_of_files_do_not(tmp_path: Path, version: int) -> None:
    in_group(tmp_path, version, "/outer/inner")
    assert page_cache_room(tmp_path) > 1 << 20
    assert most_memory(tmp_path) == total_memory()
    write_group(tmp_path, version, "/outer/inner", "max" if version == 2 else str((1 << 63) - 4096), 10, 0)
    write_group(tmp_path, version, "/outer", "4096", 3000, 500)
    assert page_cache_room(tmp_path) == 4096 - 3000 + 505
    assert most_memory(tmp_path) == 4096
    write_group(tmp_path, version, "/outer/inner", "1000", 900, 100)
    assert page_cache_room(tmp_path) == 1000 - 900 + 105
    assert most_memory(tmp_path) == 1000
    write_group(tmp_path, version, "/outer/inner", "1000", 2000, 100)
    assert page_cache_room(tmp_path) == 0


def plan_of(slots: int = 16, total: int = 0) -> MemoryPlan:
    return MemoryPlan(
        GIB, "--memory", (Need("dense", total, Phase.RUNNING),), slot_bytes=SIZE,
        slots=slots, all_slots=16, layer_slots=2, token_slots=2, context=64,
    )  # fmt: skip


def chosen(tmp_path: Path, plan: MemoryPlan, changes: dict[str, Any] | None = None, **packed: Any) -> Reading:
    """How an engine of `plan` would read experts in one file; `packed`: what is different about them."""
    composition = compose("lru", {"store": "disk", **(changes or {})})
    resolved = Resolved(Settings(lanes=2), composition, Tables(), (4,))
    found = Packed(write_experts(tmp_path / "experts"), [FORM], own=True)
    return reading.reading_for(plan, replace(found, **packed), resolved, "cpu")


@pytest.mark.parametrize(
    ("room", "plan", "changes", "kept"),
    [
        (GIB, plan_of(), {}, True),
        (GIB, plan_of(slots=15), {}, False),  # what is evicted is read again, past the page cache
        (GIB, plan_of(), {"store": "memory"}, False),
        (EXPERTS * SIZE, plan_of(), {}, False),  # a tenth is left to others
        (2 * EXPERTS * SIZE, plan_of(), {}, True),
        (64 * GIB, plan_of(total=64 * GIB), {}, False),  # what is planned needs it
    ],
)
def test_the_page_cache_is_used_where_it_has_room_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, plan: MemoryPlan, changes: dict[str, Any], kept: bool
) -> None:
    monkeypatch.setattr(reading, "page_cache_room", lambda: room)
    found = chosen(tmp_path, plan, changes, own=False)
    assert (found.keep, found.files) == (kept, None)


@pytest.mark.parametrize(("direct", "keep", "dropped"), [(True, True, 0), (False, True, 0), (False, False, EXPERTS)])
def test_pages_are_dropped_or_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, keep: bool, dropped: int
) -> None:
    extents, drops = write_experts(tmp_path / "experts"), []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: drops.append(arguments))
    reader, memory = ExtentReader(direct, keep), aligned_memory(SIZE)
    for extent in extents:
        reader.read(extent, memory, ExpertKey(0, 0, 4))
    assert (len(drops), reader.direct) == (dropped, False)
    reader.close()
