"""Memory of what sequences keep, by pages: taken as positions are written, given back with the sequence. So a slab has
addresses for its longest sequence and memory for the one that it holds."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from tiermoe.process.system_files import anonymous_memory, give_back, gives_back

PAGE = mmap.PAGESIZE


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor whose pages are taken when they are first written."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(anonymous_memory(nbytes, huge=False), dtype=dtype).view(tuple(shape))


def release(tensor: Tensor, slab: int) -> None:
    """Gives the pages of a slab of an `empty` tensor (slabs, …) back: its values are lost."""
    held = tensor[slab]
    give_back(held.data_ptr(), held.nbytes)


def taken(rows: int, room: int, row_bytes: int, heads: int) -> int:
    """The most bytes of whole pages that the first `rows` of each head's `room` rows take, which lie behind one
    another."""
    if not gives_back():
        rows = room
    region = room * row_bytes
    pages = -(-min(rows, room) * row_bytes // PAGE)
    if region % PAGE:  # a head may begin and end amid a page
        return PAGE * min(heads * (pages + 1), -(-heads * region // PAGE) + 1) if pages else 0
    return PAGE * heads * pages


def shared(slabs: int, slab_bytes: int) -> int:
    """The most bytes of pages that lie between slabs and stay when both are given back."""
    return (slabs + 1) * PAGE if slab_bytes % PAGE else 0
