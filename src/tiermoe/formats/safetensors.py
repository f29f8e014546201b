"""A Hugging Face safetensors checkpoint read with preads: never mapped, never loaded whole.

A quantised checkpoint's tensors are by their values: codes and scales are one `QuantizedTensor`, by the name and of the
shape that its values have in a checkpoint that is not quantised (`formats.quant_schemes`).
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.formats.checkpoint_quant import CheckpointQuant, Transposed4
from tiermoe.formats.source import EACH, StoredAs, require_shards
from tiermoe.platform import file_io, process_memory
from tiermoe.platform.json_files import parse_json, read_json, stays_inside
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
_READ_THREADS = 4  # that read a large tensor
READ_BYTES = 8 << 20  # bytes that one of them reads at once


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor is in a shard."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int

    @property
    def rows(self) -> int:
        """The size of dimension 0; 1 for a single number."""
        return self.shape[0] if self.shape else 1

    def segment(self, row: int | None, at: int) -> Segment:
        """Where the tensor's bytes (or those of one row) are, to be placed at byte `at` of an extent."""
        nbytes = self.nbytes if row is None else self.nbytes // self.shape[0]
        return Segment(str(self.file), self.offset + (row or 0) * nbytes, nbytes, at)


ReadRows = Callable[[TensorEntry, int, int], Tensor]
"""(tensor, first, last) → the tensor's entries first..last - 1 along dimension 0."""


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix, or one matrix an expert, that comes quantised. Reading gives its values in float32."""

    encoding: CheckpointQuant | Transposed4
    fields: Mapping[str, TensorEntry]  # of the encoding
    shape: tuple[int, ...]  # of the values
    transposed: bool = False  # a matrix's rows are the columns of the values, as transformers has them for gpt-oss
    dtype: torch.dtype = field(default=torch.float32, init=False)

    @property
    def rows(self) -> int:
        """The size of dimension 0."""
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def out_in(self) -> tuple[int, int]:
        """Rows and columns of a matrix."""
        rows, columns = self.shape[-2:]
        return (columns, rows) if self.transposed else (rows, columns)

    def values(self, read: ReadRows, first: int, last: int) -> Tensor:
        """The values first..last - 1 along dimension 0."""
        if len(self.shape) == 2:
            return self._rows(read, first, last)
        out, in_ = self.out_in
        found = torch.empty((last - first, *self.shape[1:]), dtype=self.dtype)
        for expert in range(first, last):
            raw = {name: read(entry, expert, expert + 1) for name, entry in self.fields.items()}
            weight = self.encoding.decode(self.slot(raw, out), out, in_, self.dtype)
            found[expert - first] = weight.t() if self.transposed else weight
        return found

    def slot(self, raw: Mapping[str, Tensor], out: int) -> dict[str, Tensor]:
        """The slot's fields of `out` rows, from the tensors that were read."""
        stored = {
            each.name: raw[each.name].flatten().view(torch.uint8).view(each.dtype).view(each.shape)
            for each in self.encoding.stored_fields(out, self.out_in[1], self.dtype)
        }
        return self.encoding.slot_of(stored, out, self.out_in[1])

    def _rows(self, read: ReadRows, first: int, last: int) -> Tensor:
        """The rows first..last - 1 of one matrix: reads whole blocks of rows that share scales, and all rows where they
        are stored as columns."""
        if isinstance(self.encoding, Transposed4):
            out, in_ = self.out_in
            raw = {name: read(entry, 0, entry.shape[0]) for name, entry in self.fields.items()}
            return self.encoding.decode(self.slot(raw, out), out, in_, self.dtype)[first:last]
        together = self.encoding.rows
        begin, one = first // together * together, together >= self.shape[0]
        begin, scales = (first, (0, 1)) if one else (begin, (begin // together, -(-last // together)))
        spans = {"codes": (begin, last), "scales": scales, "factors": (0, 1)}
        raw = {name: read(entry, *spans[name]) for name, entry in self.fields.items()}
        weight = self.encoding.decode(self.slot(raw, last - begin), last - begin, self.shape[1], self.dtype)
        return weight[first - begin :]


Entries = dict[str, TensorEntry | QuantizedTensor]


class Checkpoint:
    """The tensors of a checkpoint directory by name: a `source.TensorSource`, whose methods are described there.
    Opening reads the headers and checks that no shard is missing or shorter than its header says (ModelError names the
    shard and the sizes)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shards = _shards(directory)
        self.tensors: Entries = {}
        self._headers: list[bytes] = []
        self._files = FileReader()
        self._fingerprint: str | None = None
        for shard in self.shards:
            self._read_header(shard)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str, row: int | None = None) -> Tensor:
        first, last = (0, self.tensors[name].rows) if row is None else (row, row + 1)
        return self.read_rows(name, first, last)

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        entry = self.tensors[name]

        def read(part: TensorEntry, begin: int, end: int) -> Tensor:
            return self._read(name, part, begin, end)

        return read(entry, first, last) if isinstance(entry, TensorEntry) else entry.values(read, first, last)

    def _read(self, name: str, entry: TensorEntry, first: int, last: int) -> Tensor:
        nbytes = entry.nbytes // max(1, entry.rows)
        raw = self._files.read(entry.file, entry.offset + first * nbytes, (last - first) * nbytes, name)
        return raw.view(entry.dtype).view((last - first, *entry.shape[1:]) if entry.shape else ())

    def segment(self, name: str, row: int | None, at: int) -> Segment:
        """Where the bytes of `name` (or one row of it) are, to be placed at byte `at` of an extent."""
        entry = self.tensors[name]
        assert isinstance(entry, TensorEntry)
        return entry.segment(row, at)

    def own_encoding(self, name: str) -> str | None:
        """The encoding in which a matrix comes quantised; None for other tensors."""
        entry = self.tensors[name]
        if isinstance(entry, TensorEntry) or len(entry.shape) != 2 or entry.transposed:
            return None
        return entry.encoding.name

    def fields(self, name: str) -> dict[str, Tensor]:
        entry = self.tensors[name]
        assert isinstance(entry, QuantizedTensor)
        parts = {each: self._read(name, part, 0, part.rows) for each, part in entry.fields.items()}
        return entry.slot(parts, entry.out_in[0])

    def columns(self, name: str) -> Tensor | None:
        return None

    def stored_as(self, source: str, expert: int) -> list[StoredAs]:
        entry = self.tensors[source.replace(EACH, str(expert))]
        if isinstance(entry, TensorEntry):
            return [StoredAs("plain", entry.dtype)]
        return [StoredAs(entry.encoding.name, entry.dtype, entry.transposed)]

    def in_place(self, sources: Sequence[str], expert: int, offsets: Mapping[str, int]) -> list[Segment]:
        ends, segments = dict(offsets), []
        for index, source in enumerate(sources):
            entry = self.tensors[source.replace(EACH, str(expert))]
            row = None if EACH in source else expert
            parts = {"weight": entry} if isinstance(entry, TensorEntry) else entry.fields
            for name, part in parts.items():
                place = name if name in ends else f"{index}.{name}"
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
            self._fingerprint = fingerprint_of(more, shards, self._files)
        return self._fingerprint

    def close(self) -> None:
        self._files.close()

    def _read_header(self, shard: Path) -> None:
        header, start = read_header(shard)
        self._headers.append(header)
        self.tensors |= entries_of(shard, header, start, os.path.getsize(shard))


class FileReader:
    """Reads byte ranges of a checkpoint's files; a file is opened when it is first read."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def read(self, file: Path, offset: int, nbytes: int, what: str = "it") -> Tensor:
        """A fresh uint8 tensor of `nbytes` bytes of a file: a large one in huge pages, read by several threads.
        ModelError where they cannot be read."""
        if nbytes < 2 * READ_BYTES:
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            self.fill(buffer.numpy().data, file, offset, what)
            return buffer
        memory = memoryview(process_memory.anonymous_memory(nbytes))
        self.descriptor(file)  # opened once

        def fill(begin: int) -> None:
            self.fill(memory[begin : begin + READ_BYTES], file, offset + begin, what)

        with ThreadPoolExecutor(_READ_THREADS) as threads:
            list(threads.map(fill, range(0, nbytes, READ_BYTES)))
        return torch.frombuffer(memory, dtype=torch.uint8)

    def fill(self, view: memoryview, file: Path, offset: int, what: str = "it") -> None:
        """Reads as many bytes of a file as `view` has. ModelError where they cannot be read."""
        descriptor, done = self.descriptor(file), 0
        while done < len(view):
            try:
                count = file_io.read_at(descriptor, view[done:], offset + done)
            except OSError as error:
                raise ModelError(f"reading {what} from {file} failed: {error.strerror}; check the drive") from error
            if count == 0:
                raise ModelError(
                    f"{file} ended {len(view) - done:,} bytes early while reading {what}; download it again"
                )
            done += count

    def descriptor(self, file: Path) -> int:
        """The descriptor of a file. ModelError where it cannot be opened."""
        if file not in self._open:
            try:
                self._open[file], _ = file_io.open_to_read(file)
            except OSError as error:
                raise ModelError(f"cannot open {file}: {error.strerror}") from error
        return self._open[file]

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


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


def fingerprint_of(more: bytes, files: Iterable[tuple[Path, bytes]], reader: FileReader) -> str:
    """16 hex digits over `more` and, of each file, the header, the size and 32 samples of 4 KiB."""
    digest = xxhash.xxh3_64(more)
    for file, header in files:
        size = os.path.getsize(file)
        digest.update(f"{file.name}:{size}:".encode() + header)
        for sample in range(_SAMPLES):
            offset = (size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1)
            digest.update(file_io.read_bytes_at(reader.descriptor(file), _SAMPLE_BYTES, max(offset, 0)))
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
        shards = [directory / name for name in indexed(index)]
        require_shards(directory, shards)
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
