"""Encoding of one matrix, in a file and in a memory slot: the interface of all encodings, and how a matrix is encoded,
some rows at a time: with the memory of a few rows.

The native kernels encode rows where they take them: the bytes that the encodings' own `encode` gives, and how far they
are from the weights, without a temporary of the size of the weights.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from tiermoe import native
from tiermoe.errors import ConfigError
from tiermoe.formats.quantizers import Quantizer

FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""Dtypes in which kernels compute, by name."""

BLOCK_ROWS = 64
"""A matrix has a multiple of them in `RowBlocks`."""

ORDER = "cpu-avx512"
"""The order of codes below 8 bits, in the names of encodings. CPUs and GPUs take it; the name is that of the first
kernels that did."""

DECODED_WEIGHTS = 1 << 18
"""Weights that `FixedEncoding.decoded` gives at a time: bounds the float32 temporaries."""


@dataclass(frozen=True)
class Field:
    """One tensor of an encoded matrix, dense and in C order."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows_at: int = 0  # the dimension that counts the matrix's rows

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class InC:
    """How the kernels in C take a matrix in an encoding."""

    coding: str  # of `EACH_QUANT` in native/quants.h
    group: int  # columns of a row that share a scale: all of them at our 8 and 16 bits
    weights: str  # the slot's fields: the codes,
    scales: str | None = None
    others: str | None = None  # and factors or zeros
    # of published codes: what scales are, rows and columns that share one, rows that share a factor
    published: tuple[native.ScaleKind, int, int, int] = (native.ScaleKind.FLOAT, 1, 1, 1)


Squares = tuple[float, float]
"""Sums of squares: of the difference between weights and what their codes stand for, and of the weights."""

Encoded = tuple[Mapping[str, Tensor], Squares]
"""Stored fields, codes among them in buffers that the thread's next call uses again, and squares."""


def summed(squares: Iterable[Squares]) -> Squares:
    """The sums, each addition rounded: `sum` rounds once from Python 3.12 on."""
    error = size = 0.0
    for each in squares:
        error, size = error + each[0], size + each[1]
    return error, size


class Encoding(Protocol):
    """Encoding of a matrix of `out` rows and `in_` columns; `dtype` is the model's compute dtype.

    An extent of the store has the stored fields; a kernel reads the slot fields. Where both are equal, a load is a read
    into the slot; otherwise `widen` writes the slot fields from the stored ones."""

    @property
    def name(self) -> str:
        """Kind, order of codes and group, e.g. ``int4/cpu-avx512/g64``; the store records it."""
        ...

    @property
    def bits(self) -> int:
        """16 (the checkpoint's own), 8, 6, 4, 3 or 2; blocks of a GGUF file also have 5."""
        ...

    def __hash__(self) -> int: ...

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]: ...

    def slot_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]: ...

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        """The stored fields of `weight` (N, K), any floating dtype."""
        ...

    def row_multiple(self, columns: int, quantizer: Quantizer) -> int | None:
        """A block of rows that begins at a multiple of this number is encoded as it is in the whole matrix. None: the
        matrix has to be encoded whole."""
        ...

    def widen(self, stored: Mapping[str, Tensor], slot: Mapping[str, Tensor]) -> None:
        """Writes the slot fields from the stored ones; does nothing where both are equal."""
        ...

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        """The weights (N, K) that the slot fields stand for, in `dtype`; may be a transposed view."""
        ...

    def in_c(self, out: int, in_: int) -> InC | None:
        """How the kernels in C take a matrix (out, in_), if it has a shape for them; None: torch computes."""
        ...


class SameInSlot(ABC):
    """Base of encodings whose kernel reads the fields as they are stored. Where no override says otherwise, a matrix is
    encoded whole."""

    @abstractmethod
    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]: ...

    def slot_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return self.stored_fields(out, in_, dtype)

    def row_multiple(self, columns: int, quantizer: Quantizer) -> int | None:
        return None

    def widen(self, stored: Mapping[str, Tensor], slot: Mapping[str, Tensor]) -> None:
        return None

    def in_c(self, out: int, in_: int) -> InC | None:
        return None


class EncodedInC(ABC):
    """Base of encodings whose rows C encodes: a multiple of 16 columns, from and for dtypes of `native.WEIGHTS`."""

    @abstractmethod
    def encode_in_c(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> Encoded:
        """As `Encoding.encode`, with the same bytes."""


class RowBlocks(SameInSlot):
    """Base class of encodings whose blocks of `BLOCK_ROWS` rows are decoded independently."""

    def row_multiple(self, columns: int, quantizer: Quantizer) -> int | None:
        return BLOCK_ROWS

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        return self.decode_rows(slot, 0, out, in_, dtype, torch.empty(out * in_, dtype=dtype))

    @abstractmethod
    def decode_rows(
        self, slot: Mapping[str, Tensor], first: int, last: int, in_: int, dtype: torch.dtype, into: Tensor
    ) -> Tensor:
        """The weights of rows first..last - 1, a whole number of blocks: a transposed view (last - first, in_) of
        `into`, a buffer of so many values of `dtype`."""


class FixedEncoding(SameInSlot):
    """Base of encodings in which weights are published: tiermoe reads them and never packs them."""

    read_from: ClassVar[str] = "checkpoints"

    @property
    @abstractmethod
    def label(self) -> str:
        """The usual name: 'Q4_K', 'MXFP4'."""

    @abstractmethod
    def decoded(self, slot: Mapping[str, Tensor], in_: int) -> Iterator[tuple[int, Tensor]]:
        """The weights in float32, some rows at a time: (first row, (rows, in_)). A product is rounded once."""

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        """Raises ConfigError: such weights are quantised already."""
        raise ConfigError(f"{self.label} is read from {self.read_from} and never packed: choose 8, 6, 4, 3 or 2 bits")

    def slot_of(self, stored: Mapping[str, Tensor], out: int, in_: int) -> dict[str, Tensor]:
        """The slot fields of a matrix (out, in_), from the stored ones."""
        fields = self.slot_fields(out, in_, torch.float32)
        if fields == self.stored_fields(out, in_, torch.float32):
            return dict(stored)
        slot = {each.name: torch.empty(each.shape, dtype=each.dtype) for each in fields}
        self.widen(stored, slot)
        return slot

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        weight = torch.empty((out, in_), dtype=dtype)
        for first, rows in self.decoded(slot, in_):
            weight[first : first + rows.shape[0]] = rows
        return weight


class OfMatrices:
    """Base of dataclasses of encodings that count the matrices of equal rows, one after the other, that they are of."""

    matrices: int

    def stacked(self, count: int) -> Self:
        """The encoding of the rows of `count` such matrices, one after the other."""
        return replace(self, matrices=count * self.matrices)  # type: ignore[type-var]


class Scratch(threading.local):
    """Named buffers of the calling thread, used again, so that decoding a matrix allocates nothing. A buffer's contents
    last until its name is taken again.

    Fresh memory of megabytes costs more than the arithmetic on it: the system maps and clears it page by page. Prefill
    of the widened reference model took 5.5 s for 512 tokens with fresh temporaries, 2.4 s without
    (notebook/2026-11-21-native-kernels.md)."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def clear(self) -> None:
        """Frees the calling thread's buffers."""
        self._buffers.clear()

    def address(self, name: str, nbytes: int) -> int:
        """The address of the name's buffer, grown where it is too small: for code that needs no tensor."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._grown(name, nbytes)
        return buffer.data_ptr()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor; grown where the name's buffer is too small."""
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._grown(name, nbytes)
        return buffer[:nbytes].view(dtype).view(shape)

    def _grown(self, name: str, nbytes: int) -> Tensor:
        buffer = self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8)
        return buffer


scratch = Scratch()


Result = TypeVar("Result")

BLOCK_WEIGHTS = 1 << 22  # weights encoded at a time, at least
_COMPARED = 1 << 18  # weights compared at a time: their float32 temporaries stay in the cache
_NATIVE_BYTES_A_WEIGHT = 2  # packed codes, and scales in three dtypes
_BYTES_A_WEIGHT = 8  # codes twice, packed and in pieces, and the weights that they stand for
_BUFFERS = 24 << 20  # at the most: the quantizer's blocks in float32, and the buffers that decoding uses again
_BUFFER_BYTES_A_WEIGHT = 24
_NATIVE_COLUMNS = 16  # a row that is encoded natively has a multiple of them

ReadRows = Callable[[int, int], Tensor]
"""Called with (first, last): those rows of a matrix (last - first, K), any floating dtype."""

WriteField = Callable[[Field, int, Tensor], None]
"""Called with (field of the whole matrix, first row, values): those of some rows. Several workers call it at once, and
use the values' memory again afterwards."""


class Matrix(NamedTuple):
    """A matrix of `shape` (out, in_) to be encoded for kernels that compute in `dtype`."""

    encoding: Encoding
    quantizer: Quantizer
    shape: tuple[int, int]
    dtype: torch.dtype
    read: ReadRows
    write: WriteField

    def blocks(self) -> list[tuple[int, int]]:
        """(first, last) of each block of rows."""
        step = rows_at_a_time(self.encoding, self.quantizer, *self.shape)
        return [(first, min(first + step, self.shape[0])) for first in range(0, self.shape[0], step)]

    def encode_block(self, first: int, last: int) -> Squares:
        """Reads, encodes and writes the rows first..last - 1, one of `blocks`."""
        stored, squares = encode_rows(self.encoding, self.quantizer, self.read(first, last), self.dtype)
        for field in self.encoding.stored_fields(*self.shape, self.dtype):
            self.write(field, first, stored[field.name])
        return squares


def rows_at_a_time(encoding: Encoding, quantizer: Quantizer, out: int, in_: int) -> int:
    """Rows of a matrix (out, in_) that are encoded at a time: about 4 million weights, 8 million at most; all of them
    where the encoding takes only whole matrices."""
    multiple = encoding.row_multiple(in_, quantizer)
    if multiple is None:
        return out
    return min(out, multiple * max(1, -(-BLOCK_WEIGHTS // (multiple * in_))))


def workspace_bytes(
    encoding: Encoding, quantizer: Quantizer, out: int, in_: int, dtype: torch.dtype, converted: int = 0
) -> int:
    """Largest memory of each worker of `encode`, in bytes, with the rows that it reads. converted: bytes a weight where
    rows are read in another dtype."""
    weights = rows_at_a_time(encoding, quantizer, out, in_) * in_
    read = weights * (dtype.itemsize + converted)
    if encodes_natively(encoding, in_, dtype, dtype):
        return read + weights * _NATIVE_BYTES_A_WEIGHT
    return read + weights * _BYTES_A_WEIGHT + min(_BUFFERS, weights * _BUFFER_BYTES_A_WEIGHT)


def encode_matrices(
    matrices: Sequence[Matrix], progress: Callable[[int], None] = lambda blocks: None, workers: int = 1
) -> Iterator[Squares]:
    """Encodes matrices one after the other, `workers` blocks of rows at a time, each on a thread. progress: called with
    the blocks done. Yields the squares of each matrix once it is written."""
    blocks = [(matrix, rows) for matrix in matrices for rows in matrix.blocks()]
    done = in_order(lambda number: blocks[number][0].encode_block(*blocks[number][1]), len(blocks), workers)
    error = size = 0.0
    for number, ((matrix, (_, last)), squares) in enumerate(zip(blocks, done, strict=True)):
        error, size = error + squares[0], size + squares[1]
        progress(number + 1)
        if last == matrix.shape[0]:
            yield error, size
            error = size = 0.0


@torch.no_grad()
def encode_rows(encoding: Encoding, quantizer: Quantizer, weight: Tensor, dtype: torch.dtype) -> Encoded:
    """Encodes some rows of a matrix."""
    if encodes_natively(encoding, weight.shape[1], weight.dtype, dtype):
        assert isinstance(encoding, EncodedInC)
        return encoding.encode_in_c(weight.contiguous(), quantizer, dtype)
    stored = encoding.encode(weight, quantizer, dtype)
    return stored, _squares(encoding, stored, weight, dtype)


def _squares(encoding: Encoding, stored: Mapping[str, Tensor], weight: Tensor, dtype: torch.dtype) -> Squares:
    rows, columns = weight.shape
    decoded = encoding.decode(stored, rows, columns, dtype)
    error = size = 0.0
    step = max(1, _COMPARED // columns)
    for first in range(0, rows, step):
        part = weight[first : first + step].float()
        deviation = torch.sub(part, decoded[first : first + step])
        # in float64, so that the order does not show in the digits that a store keeps
        size += float(part.square().sum(dtype=torch.float64))
        error += float(deviation.square_().sum(dtype=torch.float64))
    return error, size


def in_order(work: Callable[[int], Result], count: int, workers: int) -> Iterator[Result]:
    """Yields work(0), work(1), … work(count - 1), made by `workers` threads; so many results are in memory at a time.

    Every worker computes on one thread. Threads that share one piece wait for each other at the end of every operation
    of a few megabytes; beside other programs that took up to ten times as long."""
    if workers < 2 or count < 2:
        yield from map(work, range(count))
        return
    threads = torch.get_num_threads()
    running: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for number in range(count):
            running.append(pool.submit(work, number))
            if len(running) == workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # the workers' number would be that of every thread to come


def encodes_natively(encoding: Encoding, columns: int, weights: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether rows of so many columns are encoded natively, from weights of one dtype for kernels that compute in
    another."""
    known = isinstance(encoding, EncodedInC) and columns % _NATIVE_COLUMNS == 0
    return known and weights in native.WEIGHTS and dtype in native.WEIGHTS and native.quantizes()
