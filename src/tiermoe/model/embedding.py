"""The input embedding left on the drive: a token needs one row of it, so its rows are read as they are asked for.

It is a table, not a matrix: of 150,000 rows a token uses one. Where memory is what is scarce its bytes hold experts.
"""

from __future__ import annotations

from typing import Any

import torch

from tiermoe.model.blueprint import Blueprint
from tiermoe.store.source import TensorSource


class EmbeddingOnDisk(torch.nn.Module):
    """An embedding (rows, hidden) whose values are read from the checkpoint, in the model's dtype. `weight` answers
    questions about shape and dtype only."""

    def __init__(self, checkpoint: TensorSource, key: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = checkpoint.tensors[key].shape
        self.weight = torch.empty((self.num_embeddings, self.embedding_dim), dtype=dtype, device="meta")
        self._checkpoint, self._key = checkpoint, key

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: ids of any shape → (..., hidden) on their device. IndexError for an id that has no row, ModelError
        where it cannot be read."""
        ids = tokens.flatten().tolist()
        if ids and not 0 <= min(ids) <= max(ids) < self.num_embeddings:
            raise IndexError(f"token ids from {min(ids)} to {max(ids)} for an embedding of {self.num_embeddings} rows")
        if not ids:
            return torch.empty((*tokens.shape, self.embedding_dim), dtype=self.weight.dtype, device=tokens.device)
        rows = {row: self._checkpoint.read(self._key, row) for row in sorted(set(ids))}
        # by hand: indexing a tensor wakes torch's threads for one token, and they stay awake on cores that ours need
        found = torch.cat([rows[row] for row in ids])
        return found.to(tokens.device, self.weight.dtype).view(*tokens.shape, self.embedding_dim)


def embedding_key(blueprint: Blueprint) -> str | None:
    """The checkpoint key of the input embedding, if its rows can be read one by one: a plain table that nothing else
    uses and that the checkpoint holds as it is. None otherwise."""
    table = blueprint.outline.table
    return None if table is None else blueprint.outline.tensors[table].key


def embedding_bytes(blueprint: Blueprint) -> int:
    """What the input embedding takes in memory, 0 where its rows cannot be read one by one."""
    key = embedding_key(blueprint)
    if key is None:
        return 0
    rows, hidden = blueprint.checkpoint.tensors[key].shape
    return rows * hidden * blueprint.dtype.itemsize


def leave_on_disk(model: Any, blueprint: Blueprint) -> None:
    """Replaces the input embedding of a loaded model."""
    key = embedding_key(blueprint)
    assert key is not None
    model.set_input_embeddings(EmbeddingOnDisk(blueprint.checkpoint, key, blueprint.dtype))
