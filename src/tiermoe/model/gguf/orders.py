"""Where llama.cpp's converter puts rows of a matrix: of each row of a parameter, its row in the file. Layers share one
tensor of each."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=8)
def turned(rows: int, heads: int) -> Tensor:
    """The two halves of each of so many heads take turns (`LlamaModel.permute`), so that llama.cpp's rotary embedding
    turns neighbours."""
    return torch.arange(rows).view(heads, -1, 2).swapaxes(1, 2).flatten()


@lru_cache(maxsize=8)
def tiled(key_heads: int, shared: int, rows: int) -> Tensor:
    """Heads of so many rows, `shared` of which share a key head, come as the first of every key head, the second of
    every one, … (`_LinearAttentionVReorderBase`)."""
    return torch.arange(key_heads * shared * rows).view(shared, key_heads, rows).swapaxes(0, 1).flatten()


@lru_cache(maxsize=8)
def after(rows: int, order: Tensor) -> Tensor:
    """`order`, of rows that lie after so many that are in order."""
    return torch.cat((torch.arange(rows), rows + order))


@lru_cache(maxsize=8)
def grouped(groups: int, parts: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Each of so many groups has all `parts`, of so many rows: of each part, where that of every group lies."""
    rows = torch.arange(groups * sum(parts)).view(groups, -1)
    return tuple(part.flatten() for part in torch.split(rows, list(parts), dim=1))
