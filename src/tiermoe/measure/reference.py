"""The log-probabilities of the model that others are compared with: in a file, read a few rows at a time.

They are float32, one row of the vocabulary for each scored token: too much for memory beside a model. The file is read
with ordinary reads, not mapped, because mapped pages count against the process's memory budget.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch

from tiermoe.config import format_size
from tiermoe.errors import ConfigError
from tiermoe.measure.windows import Windows
from tiermoe.process.json_files import parse_json

_FORMAT = "tiermoe log-probabilities 1"
_HEADER = 4096


class Reference:
    """A file of log-probabilities: a header that says of which checkpoint and text, then the rows, window by window."""

    def __init__(self, file: IO[bytes], name: str, fingerprint: str, windows: Windows, vocabulary: int) -> None:
        self._file = file
        self._name = name
        self._vocabulary = vocabulary
        self._tokens = windows.shape.window
        self._windows = len(windows.scored)
        self._about = {
            "format": _FORMAT, "checkpoint": fingerprint, "vocabulary": vocabulary, "windows": self._windows,
            "prompt": windows.shape.prompt, "window": self._tokens, "text": _digest(windows.scored),
        }  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return _HEADER + 4 * self._windows * self._tokens * self._vocabulary

    def begin(self) -> None:
        """Writes the header. ConfigError where the disk has no room for the rows."""
        folder = os.path.dirname(self._name) or "."
        free = shutil.disk_usage(folder).free
        if free < self.nbytes:
            raise ConfigError(
                f"the 16-bit log-probabilities of {self._windows * self._tokens:,} tokens take "
                f"{format_size(self.nbytes)}, {folder} has {format_size(free)} free; lower --tokens, free some space, "
                f"or skip the comparison with --reference none"
            )
        self._file.write(json.dumps(self._about).encode().ljust(_HEADER))

    def append(self, log_probs: torch.Tensor) -> None:
        """Writes the next rows, (n, vocabulary). ConfigError where the disk fills or fails."""
        try:
            self._file.write(log_probs.float().cpu().numpy().tobytes())
            self._file.flush()
        except OSError as error:
            raise ConfigError(
                f"writing the 16-bit log-probabilities to {self._name} failed ({error.strerror}); lower --tokens, free "
                f"some space, or skip the comparison with --reference none"
            ) from error

    def check(self) -> None:
        """ConfigError where the file is not one, was cut short, or was made of another checkpoint or text."""
        self._file.seek(0, os.SEEK_END)
        found = self._file.tell()
        self._file.seek(0)
        again = f"make it again with --save-reference {self._name}"
        try:
            about = parse_json(self._file.read(_HEADER))
            known = about["format"] == _FORMAT
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ConfigError(f"{self._name} holds no log-probabilities that this version reads; {again}")
        differing = [key for key, value in self._about.items() if about.get(key) != value]
        if differing:
            words = ", ".join(f"{key} ({about.get(key)}, not {self._about[key]})" for key in differing)
            raise ConfigError(f"{self._name} was made with another {words}; {again}")
        if found != self.nbytes:
            raise ConfigError(f"{self._name} has {found:,} bytes of {self.nbytes:,}: it was cut short; {again}")

    def window(self, index: int) -> _WindowRows:
        """The rows of a window, read as they are sliced."""
        return _WindowRows(self._file, _HEADER + 4 * index * self._tokens * self._vocabulary, self._vocabulary)


class _WindowRows:
    """Log-probabilities (window, vocabulary) in a file."""

    def __init__(self, file: IO[bytes], offset: int, vocabulary: int) -> None:
        self._file = file
        self._offset = offset
        self._row_bytes = 4 * vocabulary

    def __getitem__(self, rows: slice, /) -> torch.Tensor:
        count = rows.stop - rows.start
        self._file.seek(self._offset + rows.start * self._row_bytes)
        content = bytearray(self._file.read(count * self._row_bytes))
        return torch.frombuffer(content, dtype=torch.float32).reshape(count, -1)


@contextlib.contextmanager
def temporary_file(folder: Path) -> Iterator[tuple[IO[bytes], str]]:
    """A nameless file, gone when it is closed or the process ends, however it ends: in `folder`, or where that cannot
    be written in the system's folder for temporary files; and a name in that folder, to speak of it."""
    place = str(folder) if os.access(folder, os.W_OK) else tempfile.gettempdir()
    with tempfile.TemporaryFile(dir=place) as file:
        yield file, os.path.join(place, "the reference")


@contextlib.contextmanager
def saved_file(path: Path) -> Iterator[tuple[IO[bytes], str]]:
    """A file that gets the name `path` once it is whole. ConfigError where it cannot be written."""
    try:
        file = tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False)  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file") from error
    try:
        with file:
            yield file, str(path)
        os.replace(file.name, path)
    except BaseException:
        Path(file.name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def opened_file(path: Path) -> Iterator[tuple[IO[bytes], str]]:
    """A file that `saved_file` made. ConfigError where it cannot be read."""
    try:
        file = open(path, "rb")  # noqa: SIM115  (an error of what the caller does with it is not this file's)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; make it with --save-reference {path}, or use --reference 16bit"
        ) from error
    with file:
        yield file, str(path)


def _digest(ids: torch.Tensor) -> str:
    return hashlib.sha256(ids.to(torch.int64).numpy().tobytes()).hexdigest()[:16]
