"""Memory of the KV cache: pages that are taken as positions are written, keys and values as codes of 8 bits, and rows
of a slab that may be a ring.

A slab has addresses for its longest sequence, and memory for its current sequence."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from tiermoe.batch import Row
from tiermoe.platform.process_memory import anonymous_memory, can_free_pages, free_pages

PAGE = mmap.PAGESIZE
SCALE_BYTES = 2
"""Of the scale of 8-bit codes, bfloat16."""
_LARGEST_CODE = 127


# pages


def empty_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor whose pages are taken when they are first written."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(anonymous_memory(nbytes, huge=False), dtype=dtype).view(tuple(shape))


def release_pages(tensor: Tensor, slab: int) -> None:
    """Gives the pages of a slab of an `empty_pages` tensor (slabs, …) back: its values are lost."""
    rows = tensor[slab]
    free_pages(rows.data_ptr(), rows.nbytes)


def page_bytes(rows: int, room: int, row_bytes: int, heads: int) -> int:
    """The most bytes of whole pages that the first `rows` of each head's `room` rows take; heads lie behind one
    another."""
    if not can_free_pages():
        rows = room
    region = room * row_bytes
    pages = -(-min(rows, room) * row_bytes // PAGE)
    if region % PAGE:  # a head may begin and end amid a page
        return PAGE * min(heads * (pages + 1), -(-heads * region // PAGE) + 1) if pages else 0
    return PAGE * heads * pages


def shared_page_bytes(slabs: int, slab_bytes: int) -> int:
    """The most bytes of pages that lie between slabs and stay when both slabs are given back."""
    return (slabs + 1) * PAGE if slab_bytes % PAGE else 0


# codes of 8 bits: each head's key, and each head's value, has a scale of its own (native/attention.c makes the same)


def encode_kv(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows (..., columns) → codes int8 (..., columns) and scales bfloat16 (..., 1), which map the largest number of a
    row to 127."""
    wide = rows.float()
    scales = (wide.abs().amax(-1, keepdim=True) / _LARGEST_CODE).bfloat16()
    codes = torch.where(scales > 0, wide / scales.float(), 0).round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
    return codes.to(torch.int8), scales


def decode_kv(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that codes (..., columns) and scales (..., 1) stand for."""
    return (codes.float() * scales.float()).to(dtype)


# rows of a slab: position p lies at p % room


def write_rows(kept: Tensor, row: Row, new: Tensor) -> None:
    """Writes the keys or values (T, heads, columns) of a batch's row into kept (slabs, heads, room, columns).
    ValueError for more tokens than a ring has room for."""
    room = kept.shape[2]
    slab, new = kept[row.slab], new.transpose(0, 1)
    if row.end <= room:
        slab[:, row.first : row.end] = new
        return
    if len(row.tokens) > room:
        raise ValueError(f"{len(row.tokens)} tokens in a window with room for {room}")
    slab[:, torch.arange(row.first, row.end) % room] = new


def read_rows(kept: Tensor, row: Row, window: int | None) -> Tensor:
    """The keys or values that the tokens of a batch's row may attend to: (heads, n, columns) by ascending position, the
    row's last position at the end."""
    room = kept.shape[2]
    begin = 0 if window is None else max(0, row.first - window + 1)
    if row.end <= room:
        return kept[row.slab, :, begin : row.end]
    return kept[row.slab][:, torch.arange(begin, row.end) % room]
