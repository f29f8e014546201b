"""Files and memory by the calls of other systems, as far as this one can act them: names that they lack are removed,
and a kernel32 of ours fills the structures that Windows fills."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiermoe.formats.store_files import exclusive, whole_or_nothing
from tiermoe.platform import file_io, machine, process_memory, windows

CONTENT = bytes(range(256)) * 40
REAL = {name: getattr(os, name) for name in ("pread", "pwrite", "open")}


class Kernel32:
    """The calls that tiermoe makes, on this system's descriptors."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.error = 5
        self.opened: list[tuple[Any, ...]] = []

    def ReadFile(self, handle: Any, buffer: Any, nbytes: int, done: Any, place: Any) -> int:
        at = place._obj.offset | place._obj.offset_high << 32
        content = REAL["pread"](handle.value, nbytes, at)
        ctypes.memmove(buffer, content, len(content))
        done._obj.value = len(content)
        self.error = 5 if content else 38  # the file's end is a failure, too
        return int(not self.refuses and bool(content))

    def WriteFile(self, handle: Any, content: bytes, nbytes: int, done: Any, place: Any) -> int:
        at = place._obj.offset | place._obj.offset_high << 32
        done._obj.value = REAL["pwrite"](handle.value, content[: min(nbytes, 3000)], at)
        return int(not self.refuses)

    def CreateFileW(self, file: str, *rest: Any) -> int:
        self.opened.append(rest)
        return windows._INVALID_HANDLE if self.refuses else REAL["open"](file, os.O_RDONLY)  # type: ignore[return-value]

    def GetCurrentProcess(self) -> int:
        return -1

    def GlobalMemoryStatusEx(self, status: Any) -> int:
        assert status._obj.length == 64
        status._obj.total, status._obj.available = 16 << 30, 5 << 30
        return int(not self.refuses)

    def K32GetProcessMemoryInfo(self, process: Any, counters: Any, nbytes: int) -> int:
        assert nbytes == 72
        counters._obj.resident, counters._obj.peak = 300 << 20, 400 << 20
        return int(not self.refuses)


class Msvcrt:
    LK_NBLCK = 2

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def get_osfhandle(self, descriptor: int) -> int:
        return descriptor

    def open_osfhandle(self, handle: int, flags: int) -> int:
        return handle

    def locking(self, descriptor: int, mode: int, nbytes: int) -> None:
        file = os.fstat(descriptor).st_ino
        if file in self.locked:
            raise PermissionError(errno.EACCES, "locked")
        self.locked[file] = os.lseek(descriptor, 0, os.SEEK_CUR)


@pytest.fixture
def no_preadv(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a macOS before 11."""
    monkeypatch.delattr(os, "preadv")
    monkeypatch.delattr(os, "posix_fadvise")
    monkeypatch.delattr(os, "O_DIRECT")


@pytest.fixture
def on_windows(no_preadv: None, monkeypatch: pytest.MonkeyPatch) -> Kernel32:
    library = Kernel32()
    for name in ("pread", "pwrite"):
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(file_io, "fcntl", None)
    monkeypatch.setattr(file_io, "msvcrt", Msvcrt())
    monkeypatch.setattr(windows, "kernel32", lambda: library)
    monkeypatch.setattr(ctypes, "get_last_error", lambda: library.error, raising=False)
    for name in ("MAP_PRIVATE", "MAP_ANONYMOUS", "MADV_HUGEPAGE"):
        monkeypatch.delattr(mmap, name, raising=False)
    return library


@pytest.fixture(params=["here", "no_preadv", "on_windows"])
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

    class Fcntl:
        F_NOCACHE = 48
        error = 0

        def fcntl(self, *arguments: int) -> int:
            asked.append(arguments)  # type: ignore[arg-type]
            if self.error:
                raise OSError(self.error, "no")
            return 0

    (tmp_path / "file").write_bytes(CONTENT)
    monkeypatch.setattr(file_io, "fcntl", Fcntl())
    assert file_io.can_read_directly()
    descriptor, direct = file_io.open_to_read(tmp_path / "file", direct=True)
    assert direct
    assert asked == [(descriptor, 48, 1)]
    os.close(descriptor)
    Fcntl.error = errno.EINVAL
    descriptor, direct = file_io.open_to_read(tmp_path / "file", direct=True)
    assert not direct
    os.close(descriptor)


def test_windows_opens_past_its_cache(on_windows: Kernel32, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    descriptor, direct = file_io.open_to_read(tmp_path / "file", direct=True)
    os.close(descriptor)
    assert direct
    assert on_windows.opened == [(0x80000000, 7, None, 3, 0x20000000, None)]
    on_windows.refuses = True
    with pytest.raises(OSError, match=r"opening .*file"):
        file_io.open_to_read(tmp_path / "file", direct=True)


@pytest.mark.usefixtures("system")
def test_a_second_packer_is_told_of_the_first(tmp_path: Path) -> None:
    def waiting(whom: str, done: int, total: int) -> None:
        raise KeyboardInterrupt(whom)

    with (
        exclusive(tmp_path / "store"),
        pytest.raises(KeyboardInterrupt, match=rf"waiting for process {os.getpid()}, which packs"),
        exclusive(tmp_path / "store", waiting),
    ):
        pass


def test_windows_locks_a_byte_that_nobody_reads(on_windows: Kernel32, tmp_path: Path) -> None:
    with exclusive(tmp_path / "store"):
        (place,) = file_io.msvcrt.locked.values()
    assert place > 1 << 32


def test_names_are_synced_where_folders_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    for platform, count in (("linux", 2), ("win32", 1)):  # the file, and its folder
        synced.clear()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "platform", platform)
            with whole_or_nothing(tmp_path / "file") as handle:
                handle.write(b"x")
        assert len(synced) == count


def test_memory_as_windows_tells_it(on_windows: Kernel32, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ctypes.sizeof(windows.Overlapped) == 32
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError()))
    assert machine.available_memory() == (5 << 30, "that the machine has free")
    assert machine.total_memory() == 16 << 30
    assert (process_memory.resident_bytes(), process_memory.peak_resident_bytes()) == (300 << 20, 400 << 20)
    on_windows.refuses = True
    with pytest.raises(OSError, match="asking for free memory"):
        machine.available_memory()


ELSEWHERE = """
import contextlib, importlib, os, pkgutil, sys
for name in "accelerate fastapi gguf psutil rich sse_starlette torch transformers triton typer uvicorn".split():
    with contextlib.suppress(ImportError):  # others' modules, while all is there
        importlib.import_module(name)
for name in ("fcntl", "resource"):
    sys.modules[name] = None
for name in ("preadv", "posix_fadvise", "sched_getaffinity", "O_DIRECT", "sysconf", "sysconf_names", "killpg"):
    delattr(os, name)
import tiermoe
for module in pkgutil.walk_packages(tiermoe.__path__, "tiermoe."):
    if not module.name.endswith(("_native", "__main__")) and ".bench.llama." not in module.name:  # llama.cpp's own
        importlib.import_module(module.name)
print("imported")
"""


def test_every_module_is_imported_where_calls_of_linux_are_missing() -> None:
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=False)
    assert done.stdout == "imported\n", done.stderr[-2000:]
