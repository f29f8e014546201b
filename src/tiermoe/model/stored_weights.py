"""Dense weights from the checkpoint and its store, by the paths of an outline: no transformers model holds them.
Tensors are read when they are taken, rows of an embedding when tokens ask for them."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from tiermoe.formats.source import TensorSource
from tiermoe.formats.store import Store
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.packing import packed_linears, read_own, shared_table
from tiermoe.model.parts import Linear, PlainLinear
from tiermoe.model.weights import known_paths
from tiermoe.offload.mapped import MappedFiles
from tiermoe.offload.reader import ExtentReader
from tiermoe.types import Need, Phase

CONVERTED = 16 << 20
"""Bytes of a tensor that are there in two dtypes at a time."""
_READERS = 4  # threads with which transformers reads a checkpoint


class NoValues:
    """Placeholder, without memory, of a weight that is replaced by a packed one, or whose rows stay on the drive;
    transformers' loader takes it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype

    def __getitem__(self, index: Any) -> Tensor:
        return torch.zeros(1, dtype=self.dtype).expand(self.shape)

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return str(self.dtype)


class LazyTensor(NoValues):
    """Tensor of the checkpoint that is read when it is taken (`tensor[...]`), as `dtype`; None: as it is stored.
    Another dtype is made some rows at a time, so that the tensor is never there in both."""

    def __init__(self, checkpoint: TensorSource, key: str, dtype: torch.dtype | None) -> None:
        entry = checkpoint.tensors[key]
        super().__init__(entry.shape, dtype or entry.dtype)
        self._checkpoint, self._key = checkpoint, key

    def __getitem__(self, index: Any) -> Tensor:
        entry = self._checkpoint.tensors[self._key]
        if entry.dtype == self.dtype or not self.shape:
            return self._checkpoint.read(self._key)[index]
        rows = torch.empty(self.shape, dtype=self.dtype)
        step = max(1, CONVERTED * len(rows) // max(1, entry.nbytes))
        for first in range(0, len(rows), step):
            last = min(first + step, len(rows))
            rows[first:last] = self._checkpoint.read_rows(self._key, first, last)
        return rows[index]


class StoredWeights:
    """`Weights` of a blueprint with a whole outline. Packed layers are there at once, tensors are read when they are
    asked for, each once.

    dense: the key of the packed dense layers in the store; None: all stay as the checkpoint has them. files: the
    store's where they are mapped, of which packed layers are views; None: they are read, through the page cache if
    `keep`."""

    def __init__(
        self,
        blueprint: Blueprint,
        store: Store,
        dense: str | None,
        embedding_on_disk: bool,
        files: MappedFiles | None = None,
        keep: bool = False,
    ) -> None:
        self._blueprint, self._outline = blueprint, blueprint.outline
        self._on_disk = embedding_on_disk
        self._shared = shared_table(blueprint, "cpu") if dense is None else None
        self._known = known_paths({**self._outline.tensors, **self._outline.tied})
        self._tensors: dict[str, Tensor] = {}
        self._packed: dict[str, Linear] = {}
        if dense is not None:
            with contextlib.closing(ExtentReader(keep=keep)) as reader:
                self._packed.update(packed_linears(store, dense, reader, "cpu", files, self._bias))
        else:
            self._packed.update(read_own(blueprint, "cpu", self._bias))

    def has(self, path: str) -> bool:
        return path in self._known

    def tensor(self, path: str) -> Tensor:
        path = self._outline.tied.get(path, path)
        if path not in self._tensors:
            self._tensors[path] = self._read(path)
        return self._tensors[path]

    def linear(self, path: str) -> Linear:
        if path in self._packed:
            return self._packed[path]
        return PlainLinear(self.tensor(f"{path}.weight"), self._bias(path))

    def embedding(self, path: str) -> Callable[[Tensor], Tensor]:
        keys = self._outline.tables.get(f"{path}.weight", ())
        if not keys:
            key = embedding_key(self._blueprint) if self._on_disk else self._shared
            keys = () if key is None else (key,)
        elif not self._on_disk:
            keys = ()
        if keys:
            return EmbeddingOnDisk(self._blueprint.checkpoint, keys, self._blueprint.dtype)
        weight = self.tensor(f"{path}.weight")
        return lambda tokens: embedding(tokens, weight)

    def _bias(self, path: str) -> Tensor | None:
        return self.tensor(f"{path}.bias") if self.has(f"{path}.bias") else None

    def _read(self, path: str) -> Tensor:
        tensor = self._outline.tensors[path]
        keys = self._outline.keys_of(path)
        values = [LazyTensor(self._blueprint.checkpoint, key, tensor.read_as)[...] for key in keys]
        return (values[0] if len(values) == 1 else torch.cat(values)).to(tensor.dtype)


def read_dtypes(blueprint: Blueprint) -> dict[str, torch.dtype]:
    """Checkpoint key → dtype in the model, of the floating tensors that are taken as they are."""
    stored = blueprint.checkpoint.tensors
    return {
        tensor.key: tensor.read_as
        for tensor in blueprint.outline.tensors.values()
        if tensor.key is not None and tensor.read_as.is_floating_point and stored[tensor.key].dtype.is_floating_point
    }


def loading_needs(blueprint: Blueprint, dense: int, on_disk: bool = False) -> list[Need]:
    """Loading holds the `dense` bytes that stay and, at most, what is converted: of tensors that are taken as they are
    the rows that transformers' threads read at a time, of others all sources; nothing of tables that stay
    `on_disk`."""
    direct, stored = read_dtypes(blueprint), blueprint.checkpoint.tensors
    known = {*direct, *(table_keys(blueprint) if on_disk else ())}
    converted = sum(stored[key].nbytes for key in blueprint.dense_keys if key not in known)
    if any(stored[key].dtype != dtype for key, dtype in direct.items()):
        converted += _READERS * CONVERTED
    return [Need("dense", dense, Phase.LOADING), Need("conversion", converted, Phase.LOADING)]


# embeddings on the drive


class EmbeddingOnDisk(torch.nn.Module):
    """An embedding (rows, hidden) whose rows are read from the checkpoint as tokens ask for them, in the model's dtype.
    Of 150,000 rows a token uses one: where memory is scarce the table's bytes hold experts.

    keys: of the tensors that hold the rows, one after another. scale: of the rows; None: 1. `weight` answers questions
    about shape and dtype only."""

    def __init__(
        self, checkpoint: TensorSource, keys: Sequence[str], dtype: torch.dtype, scale: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self._begins = [0, *accumulate(checkpoint.tensors[key].shape[0] for key in keys)]
        self.num_embeddings, self.embedding_dim = self._begins[-1], checkpoint.tensors[keys[0]].shape[1]
        self.weight = torch.empty((self.num_embeddings, self.embedding_dim), dtype=dtype, device="meta")
        self._checkpoint, self._keys, self._scale = checkpoint, keys, scale

    @classmethod
    def in_place_of(cls, embedding: Any, blueprint: Blueprint, keys: Sequence[str]) -> EmbeddingOnDisk:
        """With the scale of the embedding that it replaces, if that has one."""
        return cls(blueprint.checkpoint, keys, blueprint.dtype, getattr(embedding, "embed_scale", None))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`rows` times the scale."""
        found = self.rows(tokens)
        return found if self._scale is None else found * self._scale.to(found.device, found.dtype)

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: ids of any shape → (..., hidden) on their device. IndexError for an id that has no row, ModelError
        if it cannot be read."""
        ids = tokens.flatten().tolist()
        if ids and not 0 <= min(ids) <= max(ids) < self.num_embeddings:
            raise IndexError(f"token ids from {min(ids)} to {max(ids)} for an embedding of {self.num_embeddings} rows")
        if not ids:
            return torch.empty((*tokens.shape, self.embedding_dim), dtype=self.weight.dtype, device=tokens.device)
        rows = {row: self._row(row) for row in sorted(set(ids))}
        # by hand: indexing a tensor wakes torch's threads for one token, and they stay awake on cores that ours need
        found = torch.cat([rows[row] for row in ids])
        return found.to(tokens.device, self.weight.dtype).view(*tokens.shape, self.embedding_dim)

    def _row(self, row: int) -> torch.Tensor:
        part = bisect_right(self._begins, row) - 1
        return self._checkpoint.read(self._keys[part], row - self._begins[part])


def embedding_key(blueprint: Blueprint) -> str | None:
    """The checkpoint key of the input embedding, if its rows can be read one by one: a plain table that nothing else
    uses and that the checkpoint holds as it is. None otherwise."""
    table = blueprint.outline.table
    return None if table is None else blueprint.outline.tensors[table].key


def embedding_bytes(blueprint: Blueprint) -> int:
    """Bytes of the embeddings whose rows can be read one by one."""
    outline = blueprint.outline
    paths = [*outline.tables, *([] if outline.table is None else [outline.table])]
    return sum(math.prod(outline.tensors[path].shape) for path in paths) * blueprint.dtype.itemsize


def table_keys(blueprint: Blueprint) -> set[str]:
    """Checkpoint keys of the rows of the embeddings beside the input embedding that can be read one by one."""
    return {key for keys in blueprint.outline.tables.values() for key in keys}


def leave_on_disk(model: Any, blueprint: Blueprint) -> None:
    """Replaces the embeddings of a loaded model whose rows can be read one by one."""
    key = embedding_key(blueprint)
    if key is not None:
        table = model.get_input_embeddings()
        model.set_input_embeddings(EmbeddingOnDisk.in_place_of(table, blueprint, [key]))
    for path, keys in blueprint.outline.tables.items():
        parent, _, child = path.removesuffix(".weight").rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, child, EmbeddingOnDisk.in_place_of(getattr(owner, child), blueprint, keys))
