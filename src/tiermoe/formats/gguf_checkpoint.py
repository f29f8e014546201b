"""A GGUF model as a checkpoint: parameters by the names of transformers' model, read with preads on demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tiermoe.formats.encoding import FixedEncoding, OfMatrices
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.formats.gguf_header import GgufTensor
from tiermoe.formats.gguf_types import PREFIX, gguf_encoding
from tiermoe.formats.registry import encoding_named
from tiermoe.formats.safetensors import FileReader, fingerprint_of
from tiermoe.formats.source import StoredAs
from tiermoe.types import Segment

ReadBytes = Callable[[GgufTensor, int, int], Tensor]
"""(tensor, first, last) → a fresh uint8 tensor of the entries first..last - 1 along dimension 0."""

Change = Callable[[Tensor], Tensor]


class Parameter(Protocol):
    """A parameter of a transformers model as a GGUF file has it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the model."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values that are read; float32 where the file has blocks."""

    def read(self, read: ReadBytes, first: int, last: int) -> Tensor:
        """The entries first..last - 1 along dimension 0, of `dtype`."""

    def encoding(self) -> str | None:
        """The name of the encoding of the rows; None where they have several types or are not rows of the file."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A parameter that is rows of one tensor, in their order or another."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    order: Tensor | None = field(default=None, compare=False)  # where each row is in the tensor; None: in order
    columns: Tensor | None = field(default=None, compare=False)  # likewise for each column
    change: Change | None = None  # of values that the file has otherwise

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.kind.dtype or torch.float32

    def encoding(self) -> str:
        return encoding_of(self.tensor)

    def read(self, read: ReadBytes, first: int, last: int) -> Tensor:
        factors = self.factors(read)
        if self.tensor.shape[1:] == self.shape[1:]:
            values = decoded(self.tensor, self.blocks(read, first, last), factors)
        else:  # the file dropped a dimension of size 1, or has one more
            rows = self.tensor.shape[0] if self.order is None else len(self.order)
            values = decoded(self.tensor, self.blocks(read, 0, rows), factors).view(self.shape)[first:last]
        if self.columns is not None:
            values = values[:, self.columns]
        return values if self.change is None else self.change(values)

    def blocks(self, read: ReadBytes, first: int, last: int) -> Tensor:
        """The bytes of rows, columns in the order of the file: uint8 (last - first, …, bytes of a row)."""
        if self.order is None:
            return _in_rows(self.tensor, read(self.tensor, first, last))
        order = self.order[first:last]
        begin, end = int(order.min()), int(order.max()) + 1
        rows = read(self.tensor, begin, end).view(end - begin, -1)[order - begin]
        return _in_rows(self.tensor, rows.flatten())

    def factors(self, read: ReadBytes) -> Tensor | None:
        """NVFP4's factor (1); None without."""
        return factors_of(self.tensor, read, 0, 1)


@dataclass(frozen=True, slots=True)
class _Several:
    """A parameter that is made of several tensors."""

    tensors: tuple[GgufTensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        dtypes = {tensor.kind.dtype or torch.float32 for tensor in self.tensors}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def encoding(self) -> str | None:
        names = {encoding_of(tensor) for tensor in self.tensors}
        if len(names) != 1:
            return None
        encoding = encoding_named(name := names.pop())
        return encoding.stacked(len(self.tensors)).name if isinstance(encoding, OfMatrices) else name


@dataclass(frozen=True, slots=True)
class Joined(_Several):
    """A matrix: the rows of each of `tensors`, one after the other."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(tensor.shape[0] for tensor in self.tensors), *self.tensors[0].shape[1:])

    def read(self, read: ReadBytes, first: int, last: int) -> Tensor:
        parts = [entries(tensor, read, *rows) for tensor, rows in self._parts(first, last)]
        return torch.cat([part.to(self.dtype) for part in parts])

    def blocks(self, read: ReadBytes, first: int, last: int) -> Tensor:
        """The bytes of rows of tensors of one type: uint8 (last - first, bytes of a row)."""
        return torch.cat([_in_rows(tensor, read(tensor, *rows)) for tensor, rows in self._parts(first, last)])

    def factors(self, read: ReadBytes) -> Tensor | None:
        """NVFP4's factors, one of each tensor; None without."""
        found = [each for tensor in self.tensors if (each := factors_of(tensor, read, 0, 1)) is not None]
        return torch.cat(found) if found else None

    def _parts(self, first: int, last: int) -> Iterator[tuple[GgufTensor, tuple[int, int]]]:
        """The tensors that have some of the rows, and which of their own these are."""
        begin = 0
        for tensor in self.tensors:
            rows = max(first - begin, 0), min(last - begin, tensor.shape[0])
            if rows[0] < rows[1]:
                yield tensor, rows
            begin += tensor.shape[0]


@dataclass(frozen=True, slots=True)
class Stacked(_Several):
    """A matrix, or a bias, of every expert: the rows of each of `tensors`, all (experts, rows, …), one after the
    other."""

    @property
    def shape(self) -> tuple[int, ...]:
        experts, _, *columns = self.tensors[0].shape
        return (experts, sum(tensor.shape[1] for tensor in self.tensors), *columns)

    def read(self, read: ReadBytes, first: int, last: int) -> Tensor:
        parts = [entries(tensor, read, first, last) for tensor in self.tensors]
        return torch.cat([part.to(self.dtype) for part in parts], dim=1)


@dataclass(frozen=True, slots=True)
class Expanding:
    """What expands DeepSeek's latent to keys and values, a head after the other. llama.cpp's converter splits it."""

    keys: GgufTensor  # (heads, latent, columns): transposed
    values: GgufTensor  # (heads, columns, latent)
    dtype: torch.dtype = field(default=torch.float32, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        heads, latent, columns = self.keys.shape
        return (heads * (columns + self.values.shape[1]), latent)

    def encoding(self) -> str | None:
        return None

    def read(self, read: ReadBytes, first: int, last: int) -> Tensor:
        heads = self.keys.shape[0]
        rows = self.shape[0] // heads
        begin, end = first // rows, -(-last // rows)
        keys, values = (entries(tensor, read, begin, end).float() for tensor in (self.keys, self.values))
        both = torch.cat((keys.swapaxes(1, 2), values), dim=1).flatten(0, 1)
        return both[first - begin * rows : last - begin * rows]


@dataclass(frozen=True, slots=True)
class Numbers:
    """A parameter of whole numbers that are an entry of the file."""

    values: tuple[int, ...]
    dtype: torch.dtype = field(default=torch.int64, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.values),)

    def encoding(self) -> str | None:
        return None

    def read(self, read: ReadBytes, first: int, last: int) -> Tensor:
        return torch.tensor(self.values[first:last])


def encoding_of(tensor: GgufTensor) -> str:
    """The name of the encoding of a tensor's rows: 'plain' for numbers that are values of their own."""
    name = PREFIX + tensor.kind.name.lower()
    return "plain" if tensor.kind.plain else name if tensor.factors is None else f"{name}/1"


def entries(tensor: GgufTensor, read: ReadBytes, first: int, last: int) -> Tensor:
    """The values of the entries first..last - 1 along dimension 0, as `decoded` gives them."""
    return decoded(tensor, _in_rows(tensor, read(tensor, first, last)), factors_of(tensor, read, first, last))


def decoded(tensor: GgufTensor, rows: Tensor, factors: Tensor | None) -> Tensor:
    """The values of rows (…, bytes of a row) of a tensor: float32 of blocks, else as they are. factors: of the entries
    along dimension 0, or of all."""
    if (dtype := tensor.kind.dtype) is not None:
        return rows.view(dtype)
    columns = tensor.shape[-1]
    flat = rows.reshape(-1, rows.shape[-1])
    encoding = gguf_encoding(tensor.kind.name)
    slot = encoding.slot_of({"blocks": flat}, len(flat), columns)
    values = encoding.decode(slot, len(flat), columns, torch.float32).view(*rows.shape[:-1], columns)
    return values if factors is None else values.mul_(factors.view(-1, *[1] * (values.dim() - 1)))


def factors_of(tensor: GgufTensor, read: ReadBytes, first: int, last: int) -> Tensor | None:
    """NVFP4's factors of the entries first..last - 1 along dimension 0, float32: the only one of a matrix. None without
    factors."""
    span = (first, last) if len(tensor.shape) == 3 else (0, 1)
    return None if tensor.factors is None else read(tensor.factors, *span).view(torch.float32)


def _in_rows(tensor: GgufTensor, raw: Tensor) -> Tensor:
    """Bytes of entries along dimension 0 as (entries, …, bytes of a row)."""
    if len(tensor.shape) == 1:
        return raw
    return raw.view(-1, *tensor.shape[1:-1], tensor.row_bytes)


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """A parameter's values as they are read: `nbytes` of them in `dtype`."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class GgufCheckpoint:
    """`source.TensorSource` of a GGUF file. Names are those of the parameters in transformers' model. Experts are
    stacked: (experts, rows, columns), rows of gate before rows of up."""

    def __init__(self, file: GgufFile, parameters: Mapping[str, Parameter]) -> None:
        self.file = file
        self.directory = file.path
        self.shards = list(file.shards)
        self.parameters = parameters
        self.tensors = {name: GgufEntry(each.dtype, each.shape) for name, each in parameters.items()}
        self._files = FileReader()
        self._fingerprint: str | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.parameters

    def read(self, name: str, row: int | None = None) -> Tensor:
        first, last = (0, self.parameters[name].shape[0]) if row is None else (row, row + 1)
        return self.read_rows(name, first, last)

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        return self.parameters[name].read(self._read, first, last)

    def own_encoding(self, name: str) -> str | None:
        """The encoding of a matrix that is rows of blocks of one tensor; None for other parameters."""
        parameter = self.parameters[name]
        if not isinstance(parameter, Rows | Joined) or len(parameter.shape) != 2 or parameter.encoding() == "plain":
            return None
        return parameter.encoding()

    def fields(self, name: str) -> dict[str, Tensor]:
        """The slot fields of such a matrix, rows in the parameter's order."""
        parameter = self.parameters[name]
        assert isinstance(parameter, Rows | Joined)
        stored, factors = {"blocks": parameter.blocks(self._read, 0, parameter.shape[0])}, parameter.factors(self._read)
        encoding = encoding_named(parameter.encoding() or "")
        assert isinstance(encoding, FixedEncoding)
        return encoding.slot_of(stored if factors is None else {**stored, "factors": factors}, *parameter.shape)

    def columns(self, name: str) -> Tensor | None:
        parameter = self.parameters[name]
        return parameter.columns if isinstance(parameter, Rows) else None

    def stored_as(self, source: str, expert: int) -> list[StoredAs]:
        parameter = self.parameters[source]
        assert isinstance(parameter, Stacked)
        return [StoredAs(encoding_of(tensor), tensor.kind.dtype or torch.float32) for tensor in parameter.tensors]

    def in_place(self, sources: Sequence[str], expert: int, offsets: Mapping[str, int]) -> list[Segment]:
        """Where the rows of one expert are, and their factors: those of several tensors one after the other from the
        bytes of their fields on, or each tensor's at the bytes of its own fields (`0.…`, `1.…`)."""
        segments: list[Segment] = []
        (source,), next_at = sources, dict(offsets)
        parameter = self.parameters[source]
        assert isinstance(parameter, Stacked)
        for index, tensor in enumerate(parameter.tensors):
            own = [name for name in offsets if name.startswith(f"{index}.")] or list(offsets)
            pieces = (tensor,) if tensor.factors is None else (tensor, tensor.factors)
            for name, piece in zip(own, pieces, strict=True):
                nbytes = piece.nbytes // piece.shape[0]
                at = piece.offset + expert * nbytes
                segments.append(Segment(str(piece.file), at, nbytes, next_at[name]))
                next_at[name] += nbytes
        return segments

    def fingerprint(self) -> str:
        """16 hex digits over the headers, the sizes and 32 samples of 4 KiB of each shard. Taken once."""
        if self._fingerprint is None:
            parts = zip(self.file.shards, self.file.digests, strict=True)
            self._fingerprint = fingerprint_of(b"", parts, self._files)
        return self._fingerprint

    def close(self) -> None:
        self._files.close()

    def _read(self, tensor: GgufTensor, first: int, last: int) -> Tensor:
        nbytes = tensor.nbytes // tensor.shape[0]
        return self._files.read(tensor.file, tensor.offset + first * nbytes, (last - first) * nbytes)
