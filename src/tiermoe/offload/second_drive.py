"""A copy of a model's files of experts on a second drive (`--also`): which files it has, whether they are the same, and
reads that either drive serves.

A read goes to the drive that ends it sooner, by the drives' bandwidths and by what each is reading. Whatever the copy
fails to give is read from the first drive.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from tiermoe.config import KIB, MIB
from tiermoe.errors import ConfigError, LoadError
from tiermoe.offload.probe import drive_rate
from tiermoe.offload.reader import ExtentReader
from tiermoe.platform.file_io import read_bytes_at
from tiermoe.types import ExpertKey, Extent

_COMPARED, _PIECE = 32 * MIB, 256 * KIB
"""Bytes that are compared when a copy is opened, of all files together, and at one place."""
_AGAIN = "copy it again, or remove the copy"


class SecondDrive:
    """Copies of files on another drive, if there are any. `bytes_read`: bytes of experts that they gave. `failures`:
    reads that they failed, `failure`: the first of them. `notes`: lines about the copies for people.

    files: file of experts → its copy, which is opened now. ratio: the bandwidth of the copy's drive in that of the
    first. direct: whether the copies are read past the page cache. OSError if a copy cannot be opened."""

    def __init__(
        self,
        files: Mapping[str, str] = MappingProxyType({}),
        ratio: float = 0.0,
        direct: bool = True,
        notes: Sequence[str] = (),
    ) -> None:
        self.files = files
        self.ratio = ratio
        self.notes = notes
        self.bytes_read = self.failures = 0
        self.failure = ""
        self.reader = ExtentReader(direct)
        self._left_out: set[ExpertKey] = set()
        self._lock = threading.Lock()
        for copy in files.values():
            self.reader.open(copy)

    @property
    def warning(self) -> str:
        """What the copies failed to give, for people; empty if nothing."""
        if not self.failures:
            return ""
        return f"{self.failures} reads failed and were done from the first drive; the first: {self.failure}"

    def copy_of(self, extent: Extent, key: ExpertKey) -> Extent | None:
        """Where the copy of an expert lies; None if there is none, or it failed before."""
        return None if key in self._left_out else _copy_of(extent, self.files)

    def record(self, nbytes: int) -> None:
        """The copy gave an expert of so many bytes."""
        with self._lock:
            self.bytes_read += nbytes

    def leave_out(self, key: ExpertKey, error: LoadError) -> None:
        """The copy failed to give an expert, which is read from the first drive from now on."""
        with self._lock:
            self.failures += 1
            self.failure = self.failure or str(error).partition(";")[0]
            self._left_out.add(key)


class TwoDrives(ExtentReader):
    """Reads experts from the first drive or the second, whichever ends the read sooner; parts of experts from the
    first."""

    def __init__(self, second: SecondDrive) -> None:
        super().__init__()
        self.second = second
        self._under_way = [0, 0]  # bytes, by drive

    def read(self, extent: Extent, target: memoryview, key: ExpertKey) -> None:
        """Fills `target` as `ExtentReader.read` does. LoadError if the first drive cannot."""
        copy, nbytes = self.second.copy_of(extent, key), extent.nbytes
        with self._lock:
            first, second = (under_way + nbytes for under_way in self._under_way)
            drive = int(copy is not None and second < first * self.second.ratio)
            self._under_way[drive] += nbytes
        try:
            if copy is None or not drive or not self._read_copy(copy, target, key):
                super().read(extent, target, key)
        finally:
            with self._lock:
                self._under_way[drive] -= nbytes

    def close(self) -> None:
        super().close()
        self.second.reader.close()

    def _read_copy(self, copy: Extent, target: memoryview, key: ExpertKey) -> bool:
        """False if that fails."""
        try:
            self.second.reader.read(copy, target, key)
        except LoadError as error:
            self.second.leave_out(key, error)
            return False
        self.second.record(copy.nbytes)
        with self._lock:
            self.bytes_read += copy.nbytes
        return True


def open_copy(folder: Path, extents: Sequence[Extent]) -> SecondDrive:
    """The copy in `folder` of files with experts, of which it may lack some, but not all. extents: of all experts.
    ConfigError if the folder has no file of experts, and if a file is not as the model's: names the first difference.
    Files are compared whole if they are small, else at places spread over them."""
    sources = list(dict.fromkeys(segment.file for extent in extents for segment in extent.segments))
    found = {source: folder / Path(source).name for source in sources}
    files = {source: str(copy) for source, copy in found.items() if copy.exists()}
    lacking = next((copy.name for source, copy in found.items() if source not in files), "")
    copies = [copy for extent in extents if (copy := _copy_of(extent, files)) is not None]
    if not copies:
        raise ConfigError(
            f"--also {folder} has none of the {len(sources)} files of experts, of which {lacking} is the first; copy "
            f"them there from {Path(sources[0]).parent}, all or some"
        )
    for source, name in files.items():
        _compare(source, name, _COMPARED // len(files))
    notes = []
    if lacking:
        notes.append(f"--also {folder} has {len(files)} of {len(sources)} files of experts; it lacks {lacking} first")
    if os.stat(sources[0]).st_dev == os.stat(folder).st_dev:
        notes.append(f"--also {folder} lies in the experts' own file system: a copy helps on another drive alone")
    return SecondDrive(files, drive_rate(copies) / max(drive_rate(extents), 1.0), notes=notes)


def _copy_of(extent: Extent, files: Mapping[str, str]) -> Extent | None:
    """The extent in the copies of its files; None if one has no copy."""
    if any(segment.file not in files for segment in extent.segments):
        return None
    return replace(extent, segments=tuple(replace(each, file=files[each.file]) for each in extent.segments))


def _compare(source: str, copy: str, most: int) -> None:
    """ConfigError if a copy differs from its source in size, or in one of some pieces, `most` bytes in all."""
    try:
        if os.path.samefile(source, copy):
            raise ConfigError(f"--also: {copy} is {source} itself; name a folder with a copy on another drive")
        size, copied = os.path.getsize(source), os.path.getsize(copy)
        if size != copied:
            raise ConfigError(f"--also: {copy} has {copied:,} bytes, {source} has {size:,}; {_AGAIN}")
        pieces = min(-(-size // _PIECE), max(most // _PIECE, 2))
        with open(source, "rb") as one, open(copy, "rb") as other:
            for piece in range(pieces):
                at = max(size - _PIECE, 0) * piece // max(pieces - 1, 1)
                ours, theirs = (read_bytes_at(handle.fileno(), _PIECE, at) for handle in (one, other))
                if ours != theirs:
                    at += next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
                    raise ConfigError(f"--also: {copy} differs from {source} at byte {at:,}; {_AGAIN}")
    except OSError as error:
        raise ConfigError(f"--also: {copy} cannot be read ({error.strerror}); {_AGAIN}") from error
