"""A Hugging Face safetensors checkpoint read with preads: never mapped, never loaded whole."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash

from tiermoe.errors import ModelError
from tiermoe.process import system_files
from tiermoe.process.json_files import parse_json, read_json, stays_inside
from tiermoe.store.entry import TensorEntry
from tiermoe.store.own_experts import EACH, LiesAs
from tiermoe.store.quantized_tensors import Entries, QuantizedTensor
from tiermoe.types import Segment

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_HEADER = 100 << 20  # the safetensors format's own limit
_SAMPLES = 32
_SAMPLE_BYTES = 4096
_LANES = 4  # threads that read a large tensor
_PIECE = 8 << 20  # bytes that one of them reads at once


class Checkpoint:
    """The tensors of a checkpoint directory by name. Opening reads the headers and checks that no shard is missing
    or shorter than its header says (ModelError names the shard and the sizes). Whoever knows how it is quantised gives
    it the tensors by what they stand for (`store.schemes.by_values`)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shards = _shards(directory)
        self.tensors: Entries = {}
        self._headers: list[bytes] = []
        self._descriptors = Descriptors()
        self._fingerprint: str | None = None
        for shard in self.shards:
            self._read_header(shard)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str, row: int | None = None) -> torch.Tensor:
        """A fresh tensor with the values of `name`, or of its `row` along dimension 0 (kept, of size 1)."""
        first, last = (0, rows_of(self.tensors[name])) if row is None else (row, row + 1)
        return self.read_rows(name, first, last)

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """A fresh tensor with the rows first..last - 1 of `name` along dimension 0."""
        entry = self.tensors[name]

        def read(part: TensorEntry, begin: int, end: int) -> torch.Tensor:
            return self._read(name, part, begin, end)

        return read(entry, first, last) if isinstance(entry, TensorEntry) else entry.values(read, first, last)

    def _read(self, name: str, entry: TensorEntry, first: int, last: int) -> torch.Tensor:
        nbytes = entry.nbytes // max(1, rows_of(entry))
        raw = self._descriptors.read(entry.file, entry.offset + first * nbytes, (last - first) * nbytes, name)
        return raw.view(entry.dtype).view((last - first, *entry.shape[1:]) if entry.shape else ())

    def segment(self, name: str, row: int | None, at: int) -> Segment:
        """Where the bytes of `name` (or one row of it) lie, to be placed at byte `at` of an extent."""
        entry = self.tensors[name]
        assert isinstance(entry, TensorEntry)
        return entry.segment(row, at)

    def own_encoding(self, name: str) -> str | None:
        """The encoding of a matrix that comes quantised; None for other tensors."""
        entry = self.tensors[name]
        if isinstance(entry, TensorEntry) or len(entry.shape) != 2 or entry.turned:
            return None
        return entry.encoding.name

    def fields(self, name: str) -> dict[str, torch.Tensor]:
        """Such a matrix, as a slot holds it."""
        entry = self.tensors[name]
        assert isinstance(entry, QuantizedTensor)
        parts = {field: self._read(name, part, 0, rows_of(part)) for field, part in entry.fields.items()}
        return entry.slot(parts, entry.out_in[0])

    def columns(self, name: str) -> torch.Tensor | None:
        """None: columns lie in order."""
        return None

    def ways(self, source: str, expert: int) -> list[LiesAs]:
        """How what is an expert's of a source (`own_experts`) lies."""
        entry = self.tensors[source.replace(EACH, str(expert))]
        if isinstance(entry, TensorEntry):
            return [LiesAs("plain", entry.dtype)]
        return [LiesAs(entry.encoding.name, entry.dtype, entry.turned)]

    def in_place(self, sources: Sequence[str], expert: int, offsets: Mapping[str, int]) -> list[Segment]:
        """Where what is an expert's of some sources lies, field by field, to be placed one after the other at byte
        offsets[field] of an extent and on."""
        ends, segments = dict(offsets), []
        for index, source in enumerate(sources):
            entry = self.tensors[source.replace(EACH, str(expert))]
            row = None if EACH in source else expert
            parts = {"weight": entry} if isinstance(entry, TensorEntry) else entry.fields
            for field, part in parts.items():
                place = field if field in ends else f"{index}.{field}"
                segments.append(part.segment(row, ends[place]))
                ends[place] += segments[-1].nbytes
        return segments

    def fingerprint(self) -> str:
        """16 hex digits over the config, the headers, the sizes and 32 samples of 4 KiB of each shard.

        Full contents are not read (a checkpoint may be hundreds of GB): a re-trained or edited checkpoint differs in
        the samples, an edit of a few single tensors may not; `tiermoe pack --force` packs anew then.
        Taken once, at the first call.
        """
        if self._fingerprint is None:
            config = self.directory / "config.json"
            more = config.read_bytes() if config.exists() else b""
            shards = zip(self.shards, self._headers, strict=True)
            self._fingerprint = fingerprint_of(more, shards, self._descriptors)
        return self._fingerprint

    def close(self) -> None:
        """Closes the shards; reading opens them again."""
        self._descriptors.close()

    def _read_header(self, shard: Path) -> None:
        header, start = read_header(shard)
        self._headers.append(header)
        self.tensors |= entries_of(shard, header, start, os.path.getsize(shard))


def rows_of(entry: TensorEntry | QuantizedTensor) -> int:
    """The size of its first dimension; 1 for a single number."""
    return entry.shape[0] if entry.shape else 1


def entries_of(shard: Path, header: bytes, start: int, size: int) -> dict[str, TensorEntry]:
    """The tensors that the JSON header of a shard names. start: offset of its data; size: bytes of the file.
    ModelError where the header is malformed, or the file shorter than it says."""
    found = {}
    try:
        entries: dict[str, Any] = parse_json(header)
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} of shape {shape} cannot lie in bytes {begin} to {end}")
            if start + end > size:
                raise ModelError(
                    f"{shard} is truncated: {name} ends at byte {start + end:,}, the file has {size:,}; "
                    f"download it again"
                )
            found[name] = TensorEntry(shard, dtype, shape, start + begin, end - begin)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{shard} has a malformed safetensors header ({error}); download it again") from error
    return found


class Descriptors:
    """Open files of a checkpoint, each opened when it is first read."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def read(self, file: Path, offset: int, nbytes: int, what: str = "it") -> torch.Tensor:
        """A fresh uint8 tensor of `nbytes` bytes of a file: a large one in huge pages, read by several threads.
        ModelError where they cannot be read."""
        if nbytes < 2 * _PIECE:
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            self.fill(buffer.numpy().data, file, offset, what)
            return buffer
        memory = memoryview(system_files.anonymous_memory(nbytes))
        self.of(file)  # opened once

        def fill(begin: int) -> None:
            self.fill(memory[begin : begin + _PIECE], file, offset + begin, what)

        with ThreadPoolExecutor(_LANES) as lanes:
            list(lanes.map(fill, range(0, nbytes, _PIECE)))
        return torch.frombuffer(memory, dtype=torch.uint8)

    def fill(self, view: memoryview, file: Path, offset: int, what: str = "it") -> None:
        """Reads as many bytes of a file as `view` has. ModelError where they cannot be read."""
        descriptor, done = self.of(file), 0
        while done < len(view):
            try:
                count = system_files.read_at(descriptor, view[done:], offset + done)
            except OSError as error:
                raise ModelError(f"reading {what} from {file} failed: {error.strerror}; check the drive") from error
            if count == 0:
                raise ModelError(
                    f"{file} ended {len(view) - done:,} bytes early while reading {what}; download it again"
                )
            done += count

    def of(self, file: Path) -> int:
        """The descriptor of a file. ModelError where it cannot be opened."""
        if file not in self._open:
            try:
                self._open[file], _ = system_files.open_to_read(file)
            except OSError as error:
                raise ModelError(f"cannot open {file}: {error.strerror}") from error
        return self._open[file]

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def fingerprint_of(more: bytes, files: Iterable[tuple[Path, bytes]], descriptors: Descriptors) -> str:
    """16 hex digits over `more` and, of each file, its header, its size and 32 samples of 4 KiB."""
    digest = xxhash.xxh3_64(more)
    for file, header in files:
        size = os.path.getsize(file)
        digest.update(f"{file.name}:{size}:".encode() + header)
        for sample in range(_SAMPLES):
            offset = (size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1)
            digest.update(system_files.read_bytes_at(descriptors.of(file), _SAMPLE_BYTES, max(offset, 0)))
    return digest.hexdigest()


def read_header(file: Path) -> tuple[bytes, int]:
    """The JSON header of a safetensors file and the offset of its data. ModelError where the file is torn."""
    try:
        with open(file, "rb") as handle:
            prefix = handle.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 0 <= length <= _MAX_HEADER:
                raise ModelError(f"{file} is not a safetensors file or is truncated; download it again")
            header = handle.read(length)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    if len(header) < length:
        raise ModelError(f"{file} is truncated inside its header; download it again")
    return header, 8 + length


def indexed(index: Path) -> list[str]:
    """The shards that an index names, each once. ModelError where it is malformed or names one outside its folder."""
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        outside = [name for name in names if not stays_inside(name)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is malformed ({error}); download it again") from error
    if outside:
        raise ModelError(
            f"{index} names {outside[0]!r}, which lies outside of its folder: nothing else is read; download it again"
        )
    return names


def _shards(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.exists():
        names = indexed(index)
        shards = [directory / name for name in names]
        missing = [shard.name for shard in shards if not shard.exists()]
        if missing:
            raise ModelError(
                f"{len(missing)} of {len(names)} shards are missing in {directory}: {', '.join(missing[:3])}"
                f"{' …' if len(missing) > 3 else ''}; download them again"
            )
        return shards
    single = directory / SINGLE
    if single.exists():
        return [single]
    others = sorted(directory.glob("*.safetensors"))
    if others:
        return others
    raise ModelError(
        f"{directory} holds no safetensors weights (model.safetensors or an index of shards); download them, or write "
        f"them with transformers' save_pretrained"
    )
