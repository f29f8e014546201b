"""Native I/O threads on real files: what they bring is what the files have, and what they say of wrong files."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from extent_files import EXPERTS, FORM, SIZE, bytes_of, flip, write_experts, write_pages
from patience import within
from tiermoe.errors import LoadError
from tiermoe.formats.expert_format import PAGE
from tiermoe.native import _native, available
from tiermoe.offload.disk import NativeDiskLink
from tiermoe.offload.lanes import Lanes
from tiermoe.offload.reader import ExtentReader
from tiermoe.offload.slots import HostSlots
from tiermoe.types import ExpertKey, Extent, Load, Segment

pytestmark = pytest.mark.skipif(not available(), reason="needs the native kernels")
Linked = Callable[..., NativeDiskLink]
SLOW = 8 << 20  # bytes


@pytest.fixture
def linked() -> Iterator[Linked]:
    """Makes a link over extents, by expert, into slots of so many bytes."""
    made: list[NativeDiskLink] = []

    def link(extents: list[Extent], threads: int | Lanes = 2, direct: bool = True, room: int = SIZE) -> NativeDiskLink:
        slots = HostSlots(len(extents), room)
        made.append(
            NativeDiskLink(ExtentReader(direct), slots, lambda key: extents[key.expert], lambda key: FORM, threads)
        )
        return made[-1]

    yield link
    for each in made:
        each.close()


def key(expert: int) -> ExpertKey:
    return ExpertKey(0, expert, 16)


def load(expert: int, urgent: bool = True, background: bool = False) -> Load:
    return Load(key(expert), expert, urgent, background)


def content(link: NativeDiskLink, slot: int) -> bytes:
    return link._slots.buffer(slot).numpy().tobytes()


@pytest.fixture(scope="module")
def file_of_pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pages(tmp_path_factory.mktemp("pages") / "file")


@given(
    st.lists(st.tuples(st.integers(0, 8 * PAGE), st.integers(1, 4 * PAGE), st.booleans()), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_any_pieces_come_to_their_places_and_are_checked(
    file_of_pages: Path, pieces: list[tuple[int, int, bool]], direct: bool, right: bool
) -> None:
    whole, segments, at = file_of_pages.read_bytes(), [], 0
    for offset, nbytes, aligned in pieces:
        nbytes = min(nbytes, len(whole) - offset)
        at = -(-at // PAGE) * PAGE + offset % PAGE if aligned else at
        segments.append(Segment(str(file_of_pages), offset, nbytes, at))
        at += nbytes
    parts = [whole[each.offset : each.offset + each.nbytes] for each in segments]
    checksum = xxhash.xxh3_64_hexdigest(b"".join(parts) + (b"" if right else b"!"))
    slots = HostSlots(1, at + 2 * PAGE)
    slots.buffer(0).fill_(0xAA)
    extent = Extent(tuple(segments), checksum)
    link = NativeDiskLink(ExtentReader(direct), slots, lambda key: extent, lambda key: FORM, 1)
    link.submit(load(0))
    finished = within(link.wait)
    assert (finished.error is None) == right
    if not right:
        with pytest.raises(LoadError, match="is damaged"):
            raise finished.error  # type: ignore[misc]
    found = slots.buffer(0).numpy().tobytes()
    expected = bytearray(b"\xaa" * len(found))
    for segment, part in zip(segments, parts, strict=True):
        expected[segment.at : segment.at + segment.nbytes] = part
    assert found == bytes(expected)  # and nothing beside them
    assert link.counters().bytes_read == sum(map(len, parts))
    link.close()


@pytest.mark.parametrize("seed", range(4))
def test_every_load_ends_once_or_is_taken_back_once(tmp_path: Path, linked: Linked, seed: int) -> None:
    random_, path = random.Random(seed), tmp_path / "experts"
    extents = write_experts(path)
    link, left, back, came = linked(extents, 1 << seed), list(range(EXPERTS)), list[int](), list[int]()
    while left or len(back) + len(came) < EXPERTS:
        step = random_.randrange(5)
        if step == 0 and left:
            kind = random_.randrange(3)
            link.submit(load(left.pop(), urgent=kind == 0, background=kind == 2))
        elif step == 1:
            back += [each.key.expert for each in link.recall()]
        elif step == 2:
            back += [expert for expert in range(EXPERTS) if random_.random() < 0.1 and link.withdraw(key(expert))]
        elif (finished := link.poll()) is not None:
            assert finished.error is None
            came.append(finished.load.key.expert)
            assert content(link, came[-1])[:SIZE] == bytes_of(path, extents[came[-1]])
        elif len(back) + len(came) + len(left) < EXPERTS:
            came.append(within(link.wait).load.key.expert)
    assert sorted(back + came) == list(range(EXPERTS))
    assert link.poll() is None


def test_a_rollback_forgets_what_is_under_way(tmp_path: Path, linked: Linked) -> None:
    extents = write_experts(tmp_path / "experts")
    link = linked(extents)
    for expert in range(EXPERTS):
        link.submit(load(expert, urgent=expert % 2 > 0, background=expert % 3 == 0))
    link.roll_back()
    assert link.poll() is None
    link.submit(load(0))
    assert within(link.wait).load == load(0)


def test_errors_name_the_expert_and_the_cause_and_the_link_goes_on(tmp_path: Path, linked: Linked) -> None:
    path = tmp_path / "experts"
    extents = write_experts(path)
    flip(path, SIZE + 77)
    os.truncate(path, 4 * SIZE + 100)
    gone = Extent((Segment(str(tmp_path / "gone"), 0, SIZE, 0),), "")
    folder = Extent((Segment(str(tmp_path), 0, SIZE, 0),), "")
    link = linked([*extents[:5], gone, folder], direct=False)
    expected = {
        1: r"expert 1 \(16 bits\) is damaged.*experts",
        4: rf"expert 4.*ends {SIZE - 100:,} bytes early",
        5: "expert 5.*No such file",
        6: "expert 6.*Is a directory",
    }
    for expert in range(7):
        link.submit(load(expert))
    finished = {each.load.key.expert: each.error for each in (within(link.wait) for _ in range(7))}
    assert {expert for expert, error in finished.items() if error is not None} == set(expected)
    for expert, message in expected.items():
        with pytest.raises(LoadError, match=message):
            raise finished[expert]  # type: ignore[misc]


@pytest.mark.parametrize("nbytes", [1, 16, 240, 241])
def test_short_extents_are_checked_too(tmp_path: Path, linked: Linked, nbytes: int) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(range(241)))
    checksum = xxhash.xxh3_64_hexdigest(bytes(range(nbytes)))
    extents = [Extent((Segment(str(path), 0, nbytes, 0),), each) for each in (checksum, "0" * 16)]
    link = linked(extents)
    for expert in range(2):
        link.submit(load(expert))
    errors = {each.load.key.expert: each.error for each in (within(link.wait) for _ in range(2))}
    assert errors[0] is None
    assert isinstance(errors[1], LoadError)


def test_waiting_is_counted(tmp_path: Path, linked: Linked) -> None:
    link = linked(write_experts(tmp_path / "experts"))
    link.submit(load(0))
    began = time.perf_counter()
    within(link.wait)
    assert 0 < link.counters().wait_s <= time.perf_counter() - began
    assert link.counters().busy_s > 0


def slow_and_quick(tmp_path: Path) -> list[Extent]:
    """The first extent takes some ten milliseconds, the others next to nothing."""
    if not Path("/dev/urandom").exists():
        pytest.skip("needs a file that is read slowly")
    return [Extent((Segment("/dev/urandom", 0, SLOW, 0),), ""), *write_experts(tmp_path / "experts")[1:]]


def test_no_more_are_read_at_once_than_are_allowed(tmp_path: Path, linked: Linked) -> None:
    link = linked(slow_and_quick(tmp_path), threads=4, room=SLOW)
    link._threads.allow(1, 4)
    for expert in range(5):
        link.submit(load(expert))
    assert [within(link.wait).load.key.expert for _ in range(5)] == list(range(5))
    with pytest.raises(ValueError, match="1 to 4 reads at once, not 5"):
        link._threads.allow(5, 4)


def test_reads_count_while_more_are_asked_for_than_the_floor(tmp_path: Path, linked: Linked) -> None:
    """Of five loads those that end while three are asked for; of the one that is under way at first, half."""
    link = linked(slow_and_quick(tmp_path), threads=4, room=SLOW)
    for _ in range(100):  # until all are asked for while the first is read
        link._threads.allow(1, 2)
        for expert in range(5):
            link.submit(load(expert))
        for _ in range(5):
            within(link.wait)
        nbytes, seconds, reads = link._threads.crowded()
        if (nbytes, reads) == (SLOW // 2 + 2 * SIZE, 3):
            break
    assert (nbytes, reads) == (SLOW // 2 + 2 * SIZE, 3)
    assert seconds > 0
    for take_back in (link.roll_back, link.recall, lambda: [link.withdraw(key(expert)) for expert in range(5)]):
        link._threads.allow(1, 2)
        for expert in range(5):
            link.submit(load(expert, urgent=False, background=take_back not in (link.roll_back, link.recall)))
        take_back()
        left = len(link._loads)
        for _ in range(left):
            within(link.wait)
        link._threads.allow(1, 2)
        link.submit(load(1))
        within(link.wait)
        assert link._threads.crowded() == (0, 0.0, 0)


def test_a_link_learns_how_many_are_read_at_once(tmp_path: Path, linked: Linked) -> None:
    windows: list[tuple[int, float, float]] = []

    class Told(Lanes):
        def record(self, nbytes: float, seconds: float) -> None:
            windows.append((self.limit, nbytes, seconds))
            super().record(nbytes, seconds)

    learned = Told(8)
    link = linked(write_experts(tmp_path / "experts"), threads=learned)
    for _ in range(10_000):  # whoever is quick enough leaves none to be crowded
        for expert in range(EXPERTS):
            link.submit(load(expert))
        for _ in range(EXPERTS):
            assert within(link.wait).error is None
        assert link.lanes == learned.limit
        if {limit for limit, _, _ in windows} == {4, 8}:
            break
    assert {limit for limit, _, _ in windows} >= {4, 8}
    assert all(nbytes > 0 and seconds > 0 for _, nbytes, seconds in windows)


def test_closed_threads_refuse() -> None:
    threads = _native.IOThreads(2)
    threads.close()
    threads.close()
    with pytest.raises(ValueError, match="closed"):
        threads.submit(0, 0, 0, b"")
    with pytest.raises(ValueError, match="1 to 64 threads"):
        _native.IOThreads(0)


@pytest.mark.parametrize("request_", [b"", b"\0" * 16, b"\1" * 16, b"\0" * 12 + b"\2\0\0\0" + b"\0" * 32])
def test_what_is_no_request_is_refused(request_: bytes) -> None:
    threads = _native.IOThreads(1)
    with pytest.raises(ValueError, match="not a request"):
        threads.submit(0, 0, 0, request_)
    threads.close()
