"""Reading lanes and the extent reader on real files."""

from __future__ import annotations

import os
import queue
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extent_files import EXPERTS, FORM, SIZE, bytes_of, filler, flip, write_experts, write_pages
from tiermoe.errors import LoadError
from tiermoe.formats.expert_format import PAGE
from tiermoe.offload.disk import DiskLink, SlotFiller
from tiermoe.offload.probe import drive_rate
from tiermoe.offload.reader import ExtentReader, aligned_memory
from tiermoe.offload.slots import HostSlots
from tiermoe.platform import file_io
from tiermoe.types import ExpertKey, Extent, Load, Segment


@given(
    st.integers(0, 3 * PAGE),
    st.integers(1, 5 * PAGE),
    st.integers(0, 2),
    st.none() | st.integers(0, PAGE),
    st.booleans(),
)
def test_a_part_comes_to_its_place_and_leaves_its_neighbours(
    file_of_pages: Path, offset: int, nbytes: int, pages: int, within: int | None, direct: bool
) -> None:
    """within: its page, else as in the file's."""
    content = file_of_pages.read_bytes()
    nbytes = min(nbytes, len(content) - offset)
    at = pages * PAGE + (offset % PAGE if within is None else within)
    memory = aligned_memory(9 * PAGE)
    memory[:] = b"\xaa" * len(memory)
    reader = ExtentReader(direct)
    reader.read(Extent((Segment(str(file_of_pages), offset, nbytes, at),), ""), memory, ExpertKey(0, 0, 16))
    reader.close()
    assert bytes(memory[at : at + nbytes]) == content[offset : offset + nbytes]
    assert set(bytes(memory[:at]) + bytes(memory[at + nbytes :])) <= {0xAA}


@pytest.fixture(scope="module")
def file_of_pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pages(tmp_path_factory.mktemp("pages") / "file")


@pytest.mark.parametrize("most", [1, 1000, 4096, 5000])
def test_a_read_that_ends_early_goes_on(file_of_pages: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    whole = file_io.read_scattered

    def short(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        return whole(descriptor, [views[0][:most]], offset)

    monkeypatch.setattr(file_io, "read_scattered", short)
    memory, reader = aligned_memory(6 * PAGE), ExtentReader(direct=False)
    reader.direct = most == PAGE  # what is left of a direct read must begin with a page
    reader.read(Extent((Segment(str(file_of_pages), 100, 5 * PAGE, 100),), ""), memory, ExpertKey(0, 0, 16))
    reader.close()
    assert bytes(memory[100 : 100 + 5 * PAGE]) == file_of_pages.read_bytes()[100 : 100 + 5 * PAGE]


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        (lambda path: flip(path, 3 * SIZE + 77), r"layer 5, expert 3 \(4 bits\) is damaged.*experts"),
        (lambda path: os.truncate(path, 3 * SIZE + 100), r"layer 5, expert 3.*ends 8,092 bytes early"),
        (Path.unlink, "layer 5, expert 3.*No such file"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, wrong: Callable[[Path], None], cause: str) -> None:
    extents, memory = write_experts(tmp_path / "experts"), aligned_memory(SIZE)
    wrong(tmp_path / "experts")
    reader = ExtentReader()
    with pytest.raises(LoadError, match=cause):
        reader.read(extents[3], memory, ExpertKey(5, 3, 4))
    if (tmp_path / "experts").exists():
        reader.read(extents[2], memory, ExpertKey(5, 2, 4))
    reader.close()


@pytest.mark.parametrize("lanes", [1, 8])
def test_every_load_arrives_once_with_its_bytes(tmp_path: Path, lanes: int) -> None:
    path = tmp_path / "experts"
    extents = write_experts(path)
    slots = HostSlots(EXPERTS, SIZE)
    link = DiskLink(filler(extents), slots, lanes)
    order = list(range(EXPERTS))
    random.Random(1).shuffle(order)
    for slot, expert in enumerate(order):
        link.submit(Load(ExpertKey(0, expert, 16), slot, urgent=expert % 3 > 0))
    finished = [link.wait() for _ in order]
    assert sorted(entry.load.key.expert for entry in finished) == list(range(EXPERTS))
    assert all(entry.error is None for entry in finished)
    for slot, expert in enumerate(order):
        assert slots.buffer(slot)[:SIZE].numpy().tobytes() == bytes_of(path, extents[expert])
    assert link.poll() is None
    assert link.counters().bytes_read == EXPERTS * SIZE
    link.close()


def test_urgent_loads_go_first_and_speculation_can_be_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "experts"
    extents = write_experts(path)

    class Held(ExtentReader):
        begun: queue.SimpleQueue[int] = queue.SimpleQueue()
        go_on = threading.Semaphore(0)

        def read(self, extent: Extent, target: memoryview, key: ExpertKey) -> None:
            self.begun.put(key.expert)
            self.go_on.acquire()
            super().read(extent, target, key)

    reader = Held()
    link = DiskLink(SlotFiller(reader, lambda key: extents[key.expert], lambda _: FORM), HostSlots(EXPERTS, SIZE), 1)
    link.submit(Load(ExpertKey(0, 4, 16), 4, urgent=True))
    assert reader.begun.get() == 4
    for expert in range(4):
        link.submit(Load(ExpertKey(0, expert, 16), expert, urgent=expert >= 2))
    reader.go_on.release(2)
    assert [reader.begun.get() for _ in range(2)] == [2, 3]
    assert [load.key.expert for load in link.recall()] == [0, 1]
    assert link.recall() == []
    reader.go_on.release()
    link.close()


def test_busy_time_is_told_while_a_read_goes_on(tmp_path: Path) -> None:
    extents = write_experts(tmp_path / "experts")

    class Looking(ExtentReader):
        def read(self, extent: Extent, target: memoryview, key: ExpertKey) -> None:
            self.seen = [looked.busy_s, looked.busy_s]
            super().read(extent, target, key)

    reader = Looking()
    looked = SlotFiller(reader, lambda key: extents[key.expert], lambda _: FORM)
    assert looked.busy_s == 0
    looked.fill(ExpertKey(0, 0, 16), HostSlots(1, SIZE).buffer(0))
    assert 0 < reader.seen[0] < reader.seen[1] < looked.busy_s == looked.busy_s
    looked.close()


def test_a_failed_load_is_reported_and_the_lane_lives_on(tmp_path: Path) -> None:
    path = tmp_path / "experts"
    extents = write_experts(path)
    broken = Extent(extents[0].segments, "0" * 16)
    link = DiskLink(filler([broken, *extents[1:]]), HostSlots(2, SIZE), 1)
    link.submit(Load(ExpertKey(0, 0, 16), 0, urgent=True))
    link.submit(Load(ExpertKey(0, 1, 16), 1, urgent=True))
    assert isinstance(link.wait().error, LoadError)
    assert link.wait().error is None
    link.close()


def test_a_drive_is_measured_by_what_lies_on_it(tmp_path: Path) -> None:
    assert drive_rate(write_experts(tmp_path / "experts")) > 0


def test_slots_are_aligned_and_apart() -> None:
    slots = HostSlots(3, 5000)
    assert slots.slot_bytes == 8192
    for index in range(3):
        buffer = slots.buffer(index)
        assert buffer.data_ptr() % 4096 == 0
        buffer.fill_(index + 1)
    assert [int(slots.buffer(index).float().mean()) for index in range(3)] == [1, 2, 3]
