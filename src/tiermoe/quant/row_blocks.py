"""A matrix encoded some rows at a time: the fields are those of the whole matrix, the memory is that of a few rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tiermoe.quant.encoding import Encoding, Field
from tiermoe.quant.quantized import Quantizer
from tiermoe.quant.workers import in_order

BLOCK_WEIGHTS = 1 << 22  # weights encoded at a time, at least
_COMPARED = 1 << 18  # weights compared at a time: their float32 temporaries stay in the cache
_BYTES_A_WEIGHT = 8  # codes twice, packed and in pieces, and the weights that they stand for
_BUFFERS = 24 << 20  # at the most: the quantiser's blocks in float32, and the buffers that decoding uses again
_BUFFER_BYTES_A_WEIGHT = 24

ReadRows = Callable[[int, int], Tensor]
"""Called with (first, last): those rows of a matrix (last - first, K), any floating dtype."""

WriteField = Callable[[Field, int, Tensor], None]
"""Called with (field of the whole matrix, first row, values): those of some rows."""


def rows_at_a_time(encoding: Encoding, quantizer: Quantizer, out: int, in_: int) -> int:
    """How many rows of a matrix (out, in_) are encoded together: about 4 million weights, 8 million at most; all of
    them where the encoding takes only whole matrices."""
    apart = encoding.rows_apart(in_, quantizer)
    if apart is None:
        return out
    return min(out, apart * max(1, -(-BLOCK_WEIGHTS // (apart * in_))))


def workspace_bytes(encoding: Encoding, quantizer: Quantizer, out: int, in_: int, itemsize: int) -> int:
    """What each worker of `encode` holds at the most, with the rows that it reads."""
    weights = rows_at_a_time(encoding, quantizer, out, in_) * in_
    return weights * (itemsize + _BYTES_A_WEIGHT) + min(_BUFFERS, weights * _BUFFER_BYTES_A_WEIGHT)


@torch.no_grad()
def encode(
    encoding: Encoding,
    quantizer: Quantizer,
    shape: tuple[int, int],
    dtype: torch.dtype,
    read: ReadRows,
    write: WriteField,
    progress: Callable[[int], None] = lambda rows: None,
    workers: int = 1,
) -> tuple[float, float]:
    """Encodes a matrix (out, in_) for kernels that compute in `dtype`. progress: called with the rows done.
    workers: blocks of rows that are read and encoded at a time, each on a thread.

    Returns the sums of squares of the difference and of the weights."""
    out, in_ = shape
    fields = encoding.stored_fields(out, in_, dtype)
    step = rows_at_a_time(encoding, quantizer, out, in_)
    squared_error = squared_weight = 0.0

    @torch.no_grad()
    def encoded(block: int) -> tuple[Mapping[str, Tensor], tuple[float, float]]:
        weight = read(block * step, min((block + 1) * step, out))
        stored = encoding.encode(weight, quantizer, dtype)
        return stored, _squares(encoding, stored, weight, dtype)

    for block, (stored, (error, size)) in enumerate(in_order(encoded, -(-out // step), workers)):
        for field in fields:
            write(field, block * step, stored[field.name])
        squared_error += error
        squared_weight += size
        progress(min((block + 1) * step, out))
    return squared_error, squared_weight


def _squares(
    encoding: Encoding, stored: Mapping[str, Tensor], weight: Tensor, dtype: torch.dtype
) -> tuple[float, float]:
    rows, columns = weight.shape
    decoded = encoding.decode(_in_slot(encoding, stored, rows, columns, dtype), rows, columns, dtype)
    error = size = 0.0
    step = max(1, _COMPARED // columns)
    for first in range(0, rows, step):
        part = weight[first : first + step].float()
        size += float(part.square().sum())
        error += float(torch.sub(part, decoded[first : first + step]).square_().sum())
    return error, size


def _in_slot(
    encoding: Encoding, stored: Mapping[str, Tensor], rows: int, columns: int, dtype: torch.dtype
) -> Mapping[str, Tensor]:
    fields = encoding.slot_fields(rows, columns, dtype)
    if fields == encoding.stored_fields(rows, columns, dtype):
        return stored
    slot = {field.name: torch.empty(field.shape, dtype=field.dtype) for field in fields}
    encoding.widen(stored, slot)
    return slot
