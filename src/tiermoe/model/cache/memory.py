"""Memory of the KV cache: pages that are taken as positions are written, keys and values as codes of 8 or 4 bits, and
rows of a slab that may be a ring.

A slab has addresses for its longest sequence, and memory for its current sequence."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from tiermoe.batch import Row
from tiermoe.platform.process_memory import anonymous_memory, free_pages

PAGE = mmap.PAGESIZE
CPU = torch.device("cpu")
SCALE_BYTES = 2
"""Of the scale of a row of codes, bfloat16."""
CODED = {8: torch.int8, 4: torch.uint8}
"""Bits of codes → dtype in which they are kept; uint8 has two columns each."""
COLUMNS_OF_4 = 32
"""A row of 4-bit codes has a multiple of them."""
_LARGEST_CODE = 127
_CODES_OF_4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # IQ4_NL's


# pages


def empty_pages(shape: Sequence[int], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """A tensor whose pages are taken when they are first written; on a GPU all of it is taken at once."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes or device.type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.frombuffer(anonymous_memory(nbytes, huge=False), dtype=dtype).view(tuple(shape))


def release_pages(tensor: Tensor, slab: int) -> None:
    """Gives the pages of a slab of an `empty_pages` tensor (slabs, …) back: its values are lost. A GPU keeps its
    memory."""
    if tensor.device.type == "cpu":
        rows = tensor[slab]
        free_pages(rows.data_ptr(), rows.nbytes)


def page_bytes(rows: int, room: int, row_bytes: int, heads: int) -> int:
    """The most bytes of whole pages that the first `rows` of each head's `room` rows take; heads lie after one
    another."""
    region = room * row_bytes
    pages = -(-min(rows, room) * row_bytes // PAGE)
    if region % PAGE:  # a head may begin and end amid a page
        return PAGE * min(heads * (pages + 1), -(-heads * region // PAGE) + 1) if pages else 0
    return PAGE * heads * pages


def shared_page_bytes(slabs: int, slab_bytes: int) -> int:
    """The most bytes of pages that lie between slabs and stay when both slabs are given back."""
    return (slabs + 1) * PAGE if slab_bytes % PAGE else 0


# codes: each head's key, and each head's value, has a scale of its own (native/attention.c makes the same)


def encode_kv(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """rows (..., columns) → codes and scales bfloat16 (..., 1).

    8 bits: int8 (..., columns); the scale maps the largest number of a row to 127. 4 bits: uint8 (..., columns / 2) of
    the row's Hadamard transform; the scale maps the largest number, whatever its sign, to -127, and a code is the index
    of the nearest of 16 numbers."""
    if bits == 8:
        wide = rows.float()
        scales = (wide.abs().amax(-1, keepdim=True) / _LARGEST_CODE).bfloat16()
        codes = torch.where(scales > 0, wide / scales.float(), 0).round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
        return codes.to(torch.int8), scales
    wide = _hadamard(rows.float())
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    scales = (torch.where(high > -low, high, low) / -_LARGEST_CODE).bfloat16()
    numbers = torch.tensor(_CODES_OF_4, device=rows.device)
    indices = torch.bucketize(torch.where(scales != 0, wide / scales.float(), 0), (numbers[1:] + numbers[:-1]) / 2)
    low, high = indices.to(torch.uint8).view(*rows.shape[:-1], -1, 2, COLUMNS_OF_4 // 2).unbind(-2)
    return (low | high << 4).flatten(-2), scales


def decode_kv(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers (..., columns) that codes and scales (..., 1) stand for."""
    if codes.dtype == torch.int8:
        return (codes.float() * scales.float()).to(dtype)
    halves = codes.view(*codes.shape[:-1], -1, 1, COLUMNS_OF_4 // 2)
    indices = torch.cat((halves & 15, halves >> 4), -2).flatten(-3)
    columns = indices.shape[-1]
    numbers = torch.tensor(_CODES_OF_4, dtype=torch.float32, device=codes.device)[indices.int()]
    return (_hadamard(numbers * scales.float()) / _hadamard_length(columns)).to(dtype)


def _hadamard_length(columns: int) -> int:
    """The largest power of two that divides the columns."""
    return columns & -columns


def _hadamard(rows: Tensor) -> Tensor:
    """The Hadamard transform, without its factor, of blocks of `_hadamard_length` columns: each column gets a part of
    every other, so that none is much larger than the rest."""
    half = 1
    while half < _hadamard_length(rows.shape[-1]):
        one, other = rows.view(*rows.shape[:-1], -1, 2, half).unbind(-2)
        rows = torch.stack((one + other, one - other), -2).flatten(-3)
        half *= 2
    return rows


# rows of a slab: position p lies at p % room


def places(first: int, end: int, room: int) -> list[slice]:
    """Rows of the positions `first` .. `end`, at most `room`, in their order: one piece, or two around the end of a
    ring."""
    if first >= end:
        return []
    begin, stop = first % room, (end - 1) % room + 1
    return [slice(begin, stop)] if begin < stop else [slice(begin, room), slice(0, stop)]


def write_rows(kept: Tensor, row: Row, new: Tensor) -> None:
    """Writes the keys or values (T, heads, columns) of a batch's row into kept (slabs, heads, room, columns).
    ValueError for more tokens than a ring has room for."""
    room = kept.shape[2]
    if len(row.tokens) > room:
        raise ValueError(f"{len(row.tokens)} tokens in a window with room for {room}")
    slab, new, done = kept[row.slab], new.transpose(0, 1), 0
    for place in places(row.first, row.end, room):
        end = done + place.stop - place.start
        slab[:, place], done = new[:, done:end], end


def read_rows(kept: Tensor, row: Row, window: int | None) -> Tensor:
    """The keys or values that the tokens of a batch's row may attend to: (heads, n, columns) by ascending position, the
    row's last position at the end."""
    begin = 0 if window is None else max(0, row.first - window + 1)
    parts = [kept[row.slab, :, place] for place in places(begin, row.end, kept.shape[2])]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
