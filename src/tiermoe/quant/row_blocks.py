"""Matrices encoded some rows at a time: the fields are those of a whole matrix, the memory is that of a few rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tiermoe.quant import native_encode
from tiermoe.quant.encoding import Encoding, Field
from tiermoe.quant.quantized import Quantizer
from tiermoe.quant.workers import in_order

BLOCK_WEIGHTS = 1 << 22  # weights encoded at a time, at least
_COMPARED = 1 << 18  # weights compared at a time: their float32 temporaries stay in the cache
_NATIVE_BYTES_A_WEIGHT = 2  # packed codes, and scales in three dtypes
_BYTES_A_WEIGHT = 8  # codes twice, packed and in pieces, and the weights that they stand for
_BUFFERS = 24 << 20  # at the most: the quantiser's blocks in float32, and the buffers that decoding uses again
_BUFFER_BYTES_A_WEIGHT = 24

Squares = tuple[float, float]
"""Sums of squares: of the difference between weights and what their codes stand for, and of the weights."""

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
        """(first, last) of the rows that are encoded together."""
        step = rows_at_a_time(self.encoding, self.quantizer, *self.shape)
        return [(first, min(first + step, self.shape[0])) for first in range(0, self.shape[0], step)]

    def encode_block(self, first: int, last: int) -> Squares:
        """Reads, encodes and writes the rows first..last - 1, one of `blocks`."""
        stored, squares = encode_rows(self.encoding, self.quantizer, self.read(first, last), self.dtype)
        for field in self.encoding.stored_fields(*self.shape, self.dtype):
            self.write(field, first, stored[field.name])
        return squares


def rows_at_a_time(encoding: Encoding, quantizer: Quantizer, out: int, in_: int) -> int:
    """How many rows of a matrix (out, in_) are encoded together: about 4 million weights, 8 million at most; all of
    them where the encoding takes only whole matrices."""
    apart = encoding.rows_apart(in_, quantizer)
    if apart is None:
        return out
    return min(out, apart * max(1, -(-BLOCK_WEIGHTS // (apart * in_))))


def workspace_bytes(
    encoding: Encoding, quantizer: Quantizer, out: int, in_: int, dtype: torch.dtype, converted: int = 0
) -> int:
    """What each worker of `encode` holds at the most, with the rows that it reads. converted: bytes a weight of what is
    read in another dtype."""
    weights = rows_at_a_time(encoding, quantizer, out, in_) * in_
    read = weights * (dtype.itemsize + converted)
    if native_encode.takes(encoding, in_, dtype, dtype):
        return read + weights * _NATIVE_BYTES_A_WEIGHT
    return read + weights * _BYTES_A_WEIGHT + min(_BUFFERS, weights * _BUFFER_BYTES_A_WEIGHT)


def encode(
    matrices: Sequence[Matrix], progress: Callable[[int], None] = lambda blocks: None, workers: int = 1
) -> Iterator[Squares]:
    """Encodes matrices one after the other, `workers` blocks of rows at a time, each on a thread. progress: called with
    the blocks done. Yields each one's squares once it is written."""
    blocks = [(matrix, rows) for matrix in matrices for rows in matrix.blocks()]
    done = in_order(lambda number: blocks[number][0].encode_block(*blocks[number][1]), len(blocks), workers)
    error = size = 0.0
    for number, ((matrix, (_, last)), (its_error, its_size)) in enumerate(zip(blocks, done, strict=True)):
        error, size = error + its_error, size + its_size
        progress(number + 1)
        if last == matrix.shape[0]:
            yield error, size
            error = size = 0.0


@torch.no_grad()
def encode_rows(
    encoding: Encoding, quantizer: Quantizer, weight: Tensor, dtype: torch.dtype
) -> tuple[Mapping[str, Tensor], Squares]:
    """The stored fields of some rows, valid until the thread's next call."""
    if native_encode.takes(encoding, weight.shape[1], weight.dtype, dtype):
        return native_encode.encode(encoding, quantizer, weight, dtype)
    stored = encoding.encode(weight, quantizer, dtype)
    return stored, _squares(encoding, stored, weight, dtype)


def _squares(encoding: Encoding, stored: Mapping[str, Tensor], weight: Tensor, dtype: torch.dtype) -> Squares:
    rows, columns = weight.shape
    decoded = encoding.decode(stored, rows, columns, dtype)
    error = size = 0.0
    step = max(1, _COMPARED // columns)
    for first in range(0, rows, step):
        part = weight[first : first + step].float()
        apart = torch.sub(part, decoded[first : first + step])
        # in float64, so that the order does not show in the digits that a store keeps
        size += float(part.square().sum(dtype=torch.float64))
        error += float(apart.square_().sum(dtype=torch.float64))
    return error, size
