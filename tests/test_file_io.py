"""Files and memory by the calls of other systems, as far as this one can act them: names that they lack are removed."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tiermoe.formats.store_files import whole_or_nothing
from tiermoe.platform import file_io, process_memory

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def no_preadv(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a macOS before 11."""
    monkeypatch.delattr(os, "preadv")
    monkeypatch.delattr(os, "posix_fadvise")
    monkeypatch.delattr(os, "O_DIRECT")


@pytest.fixture(params=["here", "no_preadv"])
def system(request: pytest.FixtureRequest) -> str:
    if request.param != "here":
        request.getfixturevalue(request.param)
    return str(request.param)


def test_what_is_written_at_an_offset_is_read_there(system: str, tmp_path: Path) -> None:
    descriptor = file_io.open_to_write(tmp_path / "file")
    file_io.write_at(descriptor, CONTENT, 0)
    file_io.write_at(descriptor, memoryview(b"abc"), 5_000)
    view = memoryview(bytearray(100))
    assert file_io.read_at(descriptor, view, 4_990) == 100
    assert bytes(view) == CONTENT[4_990:5_000] + b"abc" + CONTENT[5_003:5_090]
    assert file_io.read_at(descriptor, view, len(CONTENT) - 7) == 7
    assert file_io.read_at(descriptor, view, len(CONTENT)) == 0
    assert file_io.read_bytes_at(descriptor, 20, len(CONTENT) - 7) == CONTENT[-7:]
    assert (tmp_path / "file").stat().st_size == len(CONTENT)
    os.close(descriptor)


@pytest.mark.usefixtures("system")
def test_memory_and_mapped_files(tmp_path: Path) -> None:
    memory = process_memory.anonymous_memory(10_000)
    assert bytes(memory) == bytes(10_000)
    (tmp_path / "file").write_bytes(CONTENT)
    with open(tmp_path / "file", "rb") as handle:
        mapped = file_io.map_file(handle)
    mapped[0] = 77
    assert mapped[1:] == CONTENT[1:]
    assert (tmp_path / "file").read_bytes() == CONTENT  # who writes gets a copy


def test_a_direct_read_gives_the_same_bytes(system: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    descriptor, direct = file_io.open_to_read(tmp_path / "file", direct=True)
    assert direct <= file_io.can_read_directly()
    memory = memoryview(process_memory.anonymous_memory(4096))
    assert file_io.read_at(descriptor, memory, 4096) == 4096
    assert memory == CONTENT[4096:8192]
    os.close(descriptor)
    if system == "no_preadv":
        assert not direct


def test_direct_reading_on_macos(no_preadv: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def fcntl(*arguments: int) -> int:
        asked.append(arguments)  # type: ignore[arg-type]
        if refuses:
            raise OSError(errno.EINVAL, "no")
        return 0

    refuses = False
    (tmp_path / "file").write_bytes(CONTENT)
    monkeypatch.setattr(file_io, "_NOCACHE", 48)
    monkeypatch.setattr(file_io.fcntl, "fcntl", fcntl)
    assert file_io.can_read_directly()
    descriptor, direct = file_io.open_to_read(tmp_path / "file", direct=True)
    assert direct
    assert asked == [(descriptor, 48, 1)]
    os.close(descriptor)
    refuses = True
    descriptor, direct = file_io.open_to_read(tmp_path / "file", direct=True)
    assert not direct
    os.close(descriptor)


def test_names_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with whole_or_nothing(tmp_path / "file") as handle:
        handle.write(b"x")
    assert len(synced) == 2  # the file, and its folder


LINUX = ("preadv", "posix_fadvise", "sched_getaffinity", "O_DIRECT")
ELSEWHERE = f"""
import importlib, os, pkgutil
for name in {LINUX}:
    delattr(os, name)
import tiermoe.platform
for module in pkgutil.iter_modules(tiermoe.platform.__path__, "tiermoe.platform."):
    importlib.import_module(module.name)
print("imported")
"""


def test_calls_of_linux_are_named_in_one_room_which_is_imported_without_them() -> None:
    root = Path(file_io.__file__).parents[1]
    named = {
        path.relative_to(root).parts[0]
        for path in root.rglob("*.py")
        if re.search(rf"\bos\.({'|'.join(LINUX)})\b", path.read_text())
    }
    assert named == {"platform"}
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=False)
    assert done.stdout == "imported\n", done.stderr[-2000:]


def test_on_windows_the_import_says_what_is_needed() -> None:
    code = "import sys; sys.platform = 'win32'; import tiermoe"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("ImportError: tiermoe needs a POSIX system")
