"""Matrices encoded some rows at a time: the fields of a whole matrix with the memory of a few rows.

Rows are encoded by the native kernels where these take them: the bytes that the encodings' own `encode` gives, and how
far they are from the weights, without a temporary of the size of the weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tiermoe import native
from tiermoe.formats.encoding import Encoded, EncodedInC, Encoding, Field, Squares
from tiermoe.formats.quantizers import Quantizer

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


def encode(
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
