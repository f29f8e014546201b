"""A copy of the experts on a second drive (`--also`): which drive gives what, what a wrong copy says, and that no token
changes. No time is asserted."""

from __future__ import annotations

import itertools
import os
import queue
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gguf_files
import tiermoe
import tiny
from commands import Command
from extent_files import EXPERTS, FORM, SIZE, bytes_of, flip, write_experts
from gguf_engines import engine_of
from gguf_files import kinds
from parity import tokens
from patience import within
from small_engines import greedy
from tiermoe.engine.machine_rates import with_second_drive
from tiermoe.errors import ConfigError, LoadError
from tiermoe.native import available
from tiermoe.offload import second_drive
from tiermoe.offload.computers import Rates
from tiermoe.offload.disk import DiskLink, NativeDiskLink, SlotFiller
from tiermoe.offload.reader import ExtentReader
from tiermoe.offload.second_drive import SecondDrive, TwoDrives, open_copy
from tiermoe.offload.slots import HostSlots
from tiermoe.types import ExpertKey, Extent, Load, Segment

needs_native = pytest.mark.skipif(not available(), reason="needs the native kernels")
FAST, SLOW = 1e12, 1e3  # bandwidths of a second drive that takes every read, or none


def load(expert: int) -> Load:
    return Load(ExpertKey(0, expert, 4), expert, True)


@dataclass
class Copied:
    """Experts in a file, and its copy."""

    folder: Path
    extents: list[Extent] = field(init=False)

    def __post_init__(self) -> None:
        self.file, self.copy = self.folder / "experts", self.folder / "also" / "experts"
        self.extents = write_experts(self.file)
        self.copy.parent.mkdir()
        shutil.copy(self.file, self.copy)

    def second(self, ratio: float) -> SecondDrive:
        return SecondDrive({str(self.file): str(self.copy)}, ratio)

    def open(self, *extents: Extent) -> SecondDrive:
        return open_copy(self.copy.parent, [*self.extents, *extents])


@pytest.fixture
def copied(tmp_path: Path) -> Copied:
    return Copied(tmp_path)


def python_link(copied: Copied, second: SecondDrive, threads: int = 1) -> DiskLink:
    reader = TwoDrives(second)
    filler = SlotFiller(reader, lambda key: copied.extents[key.expert], lambda _: FORM)
    return DiskLink(filler, HostSlots(EXPERTS, SIZE), threads)


def native_link(copied: Copied, second: SecondDrive, threads: int = 1) -> NativeDiskLink:
    reader, slots = TwoDrives(second), HostSlots(EXPERTS, SIZE)
    return NativeDiskLink(reader, slots, lambda key: copied.extents[key.expert], lambda _: FORM, threads)


Linked = Callable[..., Any]
both_links = pytest.mark.parametrize("linked", [python_link, pytest.param(native_link, marks=needs_native)])


def brought(link: Any, experts: list[int]) -> list[Exception | None]:
    """The errors of loads of these experts, one after the other."""
    errors = []
    for expert in experts:
        link.submit(load(expert))
        errors.append(within(link.wait).error)
    return errors


# which drive


class Gate(ExtentReader):
    """A drive whose reads end when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.go_on = threading.Semaphore(0)

    def read(self, extent: Extent, target: memoryview, key: ExpertKey) -> None:
        self.begun.put(key.expert)
        self.go_on.acquire()
        super().read(extent, target, key)


class GatedDrives(TwoDrives):
    """Both drives' reads end when the test says so."""

    def __init__(self, second: SecondDrive) -> None:
        super().__init__(second)
        self.gate = Gate()

    def read_part(self, part: Segment, target: memoryview, key: ExpertKey) -> None:
        self.gate.begun.put(key.expert)
        self.gate.go_on.acquire()
        super().read_part(part, target, key)


@dataclass
class Gated:
    """Two drives whose reads end when the test says so, under eight threads."""

    copied: Copied
    ratio: float

    def __post_init__(self) -> None:
        self.second = self.copied.second(self.ratio)
        self.second.reader = self.also = Gate()
        reader = GatedDrives(self.second)
        self.first = reader.gate
        filler = SlotFiller(reader, lambda key: self.copied.extents[key.expert], lambda _: FORM)
        self.link = DiskLink(filler, HostSlots(EXPERTS, SIZE), 8)

    def begin(self, first: int, second: int) -> None:
        """Asks for so many experts, and returns once so many reads have begun on either drive."""
        for expert in range(first + second):
            self.link.submit(load(expert))
        for gate, count in ((self.first, first), (self.also, second)):
            for _ in range(count):
                within(gate.begun.get)


@pytest.mark.parametrize(
    ("ratio", "first", "second"), [(1.0, 4, 4), (0.5, 6, 2), (2.0, 3, 5), (0.1, 8, 0), (9.0, 0, 8)]
)
def test_each_drive_takes_what_it_ends_sooner(copied: Copied, ratio: float, first: int, second: int) -> None:
    drives = Gated(copied, ratio)
    drives.begin(first, second)
    for gate in (drives.first, drives.also):
        gate.go_on.release(8)
    assert [within(drives.link.wait).error for _ in range(8)] == [None] * 8
    assert (drives.link.counters().bytes_read, drives.second.bytes_read) == (8 * SIZE, second * SIZE)
    drives.link.close()


def test_a_drive_that_is_stuck_is_asked_for_no_more(copied: Copied) -> None:
    drives = Gated(copied, 1.0)
    drives.begin(4, 4)
    drives.first.go_on.release(EXPERTS)
    assert [within(drives.link.wait).error for _ in range(4)] == [None] * 4
    assert brought(drives.link, list(range(8, EXPERTS))) == [None] * (EXPERTS - 8)
    assert (drives.also.begun.qsize(), drives.second.bytes_read) == (0, 0)
    drives.also.go_on.release(4)
    assert [within(drives.link.wait).error for _ in range(4)] == [None] * 4
    assert drives.second.bytes_read == 4 * SIZE
    drives.link.close()


@both_links
@pytest.mark.parametrize(("ratio", "share"), [(2.0, 1), (1.0, 0), (0.5, 0), (0.0, 0)])
def test_alone_a_read_goes_to_the_faster_drive(copied: Copied, linked: Linked, ratio: float, share: int) -> None:
    second = copied.second(ratio)
    link = linked(copied, second)
    assert brought(link, list(range(EXPERTS))) == [None] * EXPERTS
    for expert in range(EXPERTS):
        assert link._slots.buffer(expert)[:SIZE].numpy().tobytes() == bytes_of(copied.file, copied.extents[expert])
    assert (link.counters().bytes_read, second.bytes_read) == (EXPERTS * SIZE, share * EXPERTS * SIZE)
    link.close()


@needs_native
def test_native_threads_turn_to_the_slower_drive_while_the_faster_one_reads(copied: Copied) -> None:
    if not Path("/dev/urandom").exists():
        pytest.skip("needs a file that is read slowly")
    long = 16 << 20
    copied.extents[0] = Extent((Segment("/dev/urandom", 0, long, 0),), "")
    second = copied.second(0.5)
    slots = HostSlots(EXPERTS, long)
    reader = TwoDrives(second)
    link = NativeDiskLink(reader, slots, lambda key: copied.extents[key.expert], lambda _: FORM, 2)
    for _ in range(100):  # until a thread was quick enough: at 0.5 none of these reads would go there otherwise
        for expert in (0, 1, 2):
            link.submit(load(expert))
        assert [within(link.wait).error for _ in range(3)] == [None] * 3
        if second.bytes_read:
            break
    assert second.bytes_read > 0
    link.close()


@both_links
@pytest.mark.parametrize("threads", [1, 4])
def test_an_expert_without_a_copy_comes_from_the_first_drive(copied: Copied, linked: Linked, threads: int) -> None:
    alone = copied.folder / "alone"
    shutil.copy(copied.file, alone)
    for expert in range(0, EXPERTS, 2):
        extent = copied.extents[expert]
        copied.extents[expert] = Extent((replace(extent.segments[0], file=str(alone)),), extent.checksum)
    second = copied.second(1e9)
    link = linked(copied, second, threads)
    for expert in range(EXPERTS):
        link.submit(load(expert))
    assert [within(link.wait).error for _ in range(EXPERTS)] == [None] * EXPERTS
    assert (link.counters().bytes_read, second.bytes_read) == (EXPERTS * SIZE, EXPERTS // 2 * SIZE)
    link.close()


# copies that fail


@both_links
@pytest.mark.parametrize("how", ["damaged", "ends"])
def test_what_the_copy_fails_to_give_the_first_drive_gives(copied: Copied, linked: Linked, how: str) -> None:
    second = copied.second(2.0)
    link = linked(copied, second)
    if how == "damaged":
        flip(copied.copy, 3 * SIZE + 77)
        failed = [3]
    else:
        os.truncate(copied.copy, 14 * SIZE)
        failed = [14, 15]
    assert second.warning == ""
    assert brought(link, list(range(EXPERTS))) == [None] * EXPERTS
    for expert in range(EXPERTS):
        assert link._slots.buffer(expert)[:SIZE].numpy().tobytes() == bytes_of(copied.file, copied.extents[expert])
    assert (link.counters().bytes_read, second.bytes_read) == (EXPERTS * SIZE, (EXPERTS - len(failed)) * SIZE)
    assert second.warning.startswith(f"{len(failed)} reads failed")
    assert f"expert {failed[0]} (4 bits)" in second.warning
    assert str(copied.copy) in second.warning
    assert brought(link, failed) == [None] * len(failed)
    assert second.failures == len(failed)  # a copy that failed is asked no more
    flip(copied.file, failed[0] * SIZE + 77)  # neither drive has it
    (error,) = brought(link, failed[:1])
    assert isinstance(error, LoadError)
    assert f"its bytes in {copied.file} do not match" in str(error)
    link.close()


# opening a copy


def test_a_copy_is_opened_and_both_drives_are_measured(copied: Copied, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {str(copied.file): 2e9, str(copied.copy): 3e9}
    monkeypatch.setattr(second_drive, "drive_rate", lambda extents: rates[extents[0].segments[0].file])
    second = copied.open()
    assert second.files == {str(copied.file): str(copied.copy)}
    assert second.ratio == 1.5
    assert "file system" in " ".join(second.notes)
    second.reader.close()


def test_a_copy_of_some_files_names_the_first_that_it_lacks(copied: Copied) -> None:
    more = Extent((Segment(str(copied.folder / "more"), 0, SIZE, 0),), "")
    second = copied.open(*[more] * EXPERTS)  # as many experts as the file has that is copied
    assert "has 1 of 2 files of experts; it lacks more first" in second.notes[0]
    assert second.copy_of(more, load(0).key) is None
    second.reader.close()


def in_place_of(copy: Path, make: Callable[[Path], Any]) -> None:
    copy.unlink()
    make(copy)


WRONG: dict[str, tuple[Callable[[Copied], Any], str]] = {
    "lacks": (
        lambda copied: copied.copy.unlink(),
        r"has none of the 1 files of experts, of which experts is the first; copy them there from ",
    ),
    "shorter": (
        lambda copied: os.truncate(copied.copy, 1000),
        rf"also/experts has 1,000 bytes, .*experts has {EXPERTS * SIZE:,}; copy it again",
    ),
    "changed": (
        lambda copied: flip(copied.copy, 5 * SIZE + 9),
        rf"also/experts differs from .*experts at byte {5 * SIZE + 9:,}; copy it again",
    ),
    "linked": (
        lambda copied: in_place_of(copied.copy, lambda copy: copy.symlink_to(copied.file)),
        r"also/experts is .*experts itself",
    ),
    "a folder": (lambda copied: in_place_of(copied.copy, Path.mkdir), r"also/experts "),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_copy_is_refused_and_the_first_difference_named(copied: Copied, wrong: str) -> None:
    make, said = WRONG[wrong]
    make(copied)
    with pytest.raises(ConfigError, match=said):
        copied.open()


def test_large_files_are_compared_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_drive, "_COMPARED", 1 << 20)
    files = [tmp_path / name for name in ("one", "also/one")]
    (tmp_path / "also").mkdir()
    extent = Extent((Segment(str(files[0]), 0, 4096, 0),), "")
    size = (64 << 20) + 5
    for at in (0, size - 1):
        for file in files:
            with open(file, "wb") as handle:
                handle.truncate(size)
        flip(files[1], at)
        with pytest.raises(ConfigError, match=rf"at byte {at:,}"):
            open_copy(tmp_path / "also", [extent])


# engines


@pytest.fixture
def bandwidth(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets what is found of the second drive, beside 1 GB/s of the first."""

    def set_to(bytes_per_second: float) -> None:
        rates = itertools.cycle((bytes_per_second, 1e9))
        monkeypatch.setattr(second_drive, "drive_rate", lambda _: next(rates))

    return set_to


IDS = tokens(1, 40)


def answer(directory: Path, **options: Any) -> tuple[list[int], dict[str, Any]]:
    with tiermoe.load(directory, memory="4GiB", device="cpu", cache="30%", lanes=2, **options) as (model, _):
        mask = torch.ones_like(IDS)
        found = model.generate(IDS, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
        return found[0].tolist(), model.tiermoe.stats()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in bfloat16, and its store."""
    directory, store = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("store")
    tiny.write(directory, "qwen3_moe", torch.bfloat16)
    answer(directory, store=store)
    return directory, store


@pytest.mark.parametrize(
    ("bits", "layers", "speed", "native"),
    [(4, 3, FAST, True), (4, 3, SLOW, True), (4, 2, FAST, True), (4, 3, FAST, False), (16, 3, FAST, True)],
)
def test_no_token_depends_on_the_second_drive(
    packed: tuple[Path, Path], tmp_path: Path, bandwidth: Callable[[float], None], request: pytest.FixtureRequest,
    bits: int, layers: int, speed: float, native: bool,
) -> None:  # fmt: skip
    """A copy of the files of so many layers; at 16 bits of the checkpoint, where the experts lie then."""
    directory, store = packed
    bandwidth(speed)
    if not native:
        request.getfixturevalue("without_native")
    files = sorted(store.glob("experts-*"))[:layers] if bits == 4 else [directory / "model.safetensors"]
    for file in files:
        shutil.copy(file, tmp_path)
    expected, before = answer(directory, store=store, bits=bits)
    found, stats = answer(directory, store=store, bits=bits, also=tmp_path)
    assert found == expected
    assert (before["bytes_read_also"], stats["also_warning"]) == (0, "")
    if layers == 2:
        assert 0 < stats["bytes_read_also"] < stats["bytes_read"]
    else:
        assert stats["bytes_read_also"] == (stats["bytes_read"] if speed == FAST else 0)


def test_a_gguf_file_and_its_copy(tmp_path: Path, bandwidth: Callable[[float], None]) -> None:
    bandwidth(FAST)
    model = gguf_files.model_of("qwen3_moe, wide")
    file = gguf_files.write(tmp_path / "m.gguf", model, "qwen3_moe, wide", kinds("q4_k"))
    (tmp_path / "also").mkdir()
    shutil.copy(file, tmp_path / "also")
    ids, found = IDS[0].tolist(), []
    for also in (None, tmp_path / "also"):
        engine = engine_of(file, torch.bfloat16, store=tmp_path / "store", cache="50%", also=also)
        found.append(greedy(engine, ids, 8))
        stats = engine.stats()
        engine.close()
    assert found[0] == found[1]
    assert stats["bytes_read_also"] == stats["bytes_read"] > 0
    flip(tmp_path / "also" / "m.gguf", file.stat().st_size - 50)
    with pytest.raises(ConfigError, match=r"also/m\.gguf differs from .*m\.gguf at byte"):
        engine_of(file, torch.bfloat16, store=tmp_path / "store", cache="50%", also=tmp_path / "also")


# commands


def test_a_report_says_what_each_drive_gave(
    packed: tuple[Path, Path], tmp_path: Path, bandwidth: Callable[[float], None], tiermoe_: Command
) -> None:
    directory, store = packed
    bandwidth(FAST)
    for file in store.glob("experts-*layer00[01]*"):
        shutil.copy(file, tmp_path)
    words = ("run", directory, "Once", "--store", store, "--cache", "30%", "--lanes", "1", "--max-tokens", "4")
    done = tiermoe_(*words, "--also", tmp_path)
    assert done.code == 0
    assert "from --also)" in done.err
    assert "has 2 of 3 files of experts; it lacks experts-4-hqq-layer002.safetensors first" in done.err


@pytest.mark.parametrize(
    ("command", "words", "cause"),
    [
        (("run", "Once"), ("--also", "missing"), "--also missing is no folder"),
        (("plan",), ("--also", "missing"), "--also missing is no folder"),
        (("plan",), ("--also", ".", "--set", "store=memory"), "store=memory"),
        (("run", "Once"), ("--also", ".", "--set", "unit=neuron", "--set", "theta=.1", "--set", "upper_limit=.5"),
         "unit=neuron"),
    ],
)  # fmt: skip
def test_what_also_does_not_serve_is_refused(
    packed: tuple[Path, Path], tiermoe_: Command, command: tuple[str, ...], words: tuple[str, ...], cause: str
) -> None:
    directory, store = packed
    assert cause in tiermoe_(command[0], directory, *command[1:], "--store", store, *words).cause


def test_plan_adds_the_drives_up(tmp_path: Path, packed: tuple[Path, Path], tiermoe_: Command) -> None:
    rates = Rates(1e10, 1e9, 1e11, "measured")
    both = with_second_drive(rates, tmp_path)
    assert both.drive > rates.drive
    assert str(tmp_path) in both.source
    assert list(tmp_path.iterdir()) == []
    named = ("--machine", "laptop-ddr5", "--memory", "4GiB")
    assert "leave out one" in tiermoe_("plan", packed[0], *named, "--also", tmp_path).cause
