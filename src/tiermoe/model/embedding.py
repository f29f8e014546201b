"""Embeddings left on the drive: a token needs a row of them, so their rows are read as they are asked for.

They are tables, not matrices: of 150,000 rows a token uses one. Where memory is what is scarce their bytes hold
experts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from tiermoe.model.blueprint import Blueprint
from tiermoe.store.source import TensorSource


class EmbeddingOnDisk(torch.nn.Module):
    """An embedding (rows, hidden) whose values are read from the checkpoint, in the model's dtype. keys: of the tensors
    that hold its rows, one after another. scale: what rows are multiplied by, None: nothing. `weight` answers questions
    about shape and dtype only."""

    def __init__(
        self, checkpoint: TensorSource, keys: Sequence[str], dtype: torch.dtype, scale: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self._begins = [0, *accumulate(checkpoint.tensors[key].shape[0] for key in keys)]
        self.num_embeddings, self.embedding_dim = self._begins[-1], checkpoint.tensors[keys[0]].shape[1]
        self.weight = torch.empty((self.num_embeddings, self.embedding_dim), dtype=dtype, device="meta")
        self._checkpoint, self._keys, self._scale = checkpoint, keys, scale

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: ids of any shape → (..., hidden) on their device. IndexError for an id that has no row, ModelError
        where it cannot be read."""
        ids = tokens.flatten().tolist()
        if ids and not 0 <= min(ids) <= max(ids) < self.num_embeddings:
            raise IndexError(f"token ids from {min(ids)} to {max(ids)} for an embedding of {self.num_embeddings} rows")
        if not ids:
            return torch.empty((*tokens.shape, self.embedding_dim), dtype=self.weight.dtype, device=tokens.device)
        rows = {row: self._row(row) for row in sorted(set(ids))}
        # by hand: indexing a tensor wakes torch's threads for one token, and they stay awake on cores that ours need
        found = torch.cat([rows[row] for row in ids])
        found = found.to(tokens.device, self.weight.dtype).view(*tokens.shape, self.embedding_dim)
        return found if self._scale is None else found * self._scale.to(found.device, found.dtype)

    def _row(self, row: int) -> torch.Tensor:
        part = bisect_right(self._begins, row) - 1
        return self._checkpoint.read(self._keys[part], row - self._begins[part])


def embedding_key(blueprint: Blueprint) -> str | None:
    """The checkpoint key of the input embedding, if its rows can be read one by one: a plain table that nothing else
    uses and that the checkpoint holds as it is. None otherwise."""
    table = blueprint.outline.table
    return None if table is None else blueprint.outline.tensors[table].key


def embedding_bytes(blueprint: Blueprint) -> int:
    """What embeddings take in memory whose rows can be read one by one."""
    outline = blueprint.outline
    paths = [*outline.tables, *([] if outline.table is None else [outline.table])]
    return sum(math.prod(outline.tensors[path].shape) for path in paths) * blueprint.dtype.itemsize


def table_keys(blueprint: Blueprint) -> set[str]:
    """Checkpoint keys of the rows of such embeddings, the input embedding apart."""
    return {key for keys in blueprint.outline.tables.values() for key in keys}


def leave_on_disk(model: Any, blueprint: Blueprint) -> None:
    """Replaces the embeddings of a loaded model whose rows can be read one by one."""
    key = embedding_key(blueprint)
    if key is not None:
        model.set_input_embeddings(EmbeddingOnDisk(blueprint.checkpoint, [key], blueprint.dtype))
    for path, keys in blueprint.outline.tables.items():
        parent, _, child = path.removesuffix(".weight").rpartition(".")
        owner = model.get_submodule(parent)
        scale = getattr(getattr(owner, child), "embed_scale", None)
        setattr(owner, child, EmbeddingOnDisk(blueprint.checkpoint, keys, blueprint.dtype, scale))
