"""Dense weights from the checkpoint and its store, as an outline names them: no transformers model holds them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from tiermoe.model.blueprint import Blueprint
from tiermoe.model.dense import packed_linears
from tiermoe.model.embedding import EmbeddingOnDisk, embedding_key, table_keys
from tiermoe.model.linear import Linear, PlainLinear
from tiermoe.model.own_linears import read_own, shared_table
from tiermoe.store.source import TensorSource
from tiermoe.store.store import Store
from tiermoe.tiers.mapped import MappedFiles
from tiermoe.tiers.reader import ExtentReader
from tiermoe.types import Need, Phase

CONVERTED = 16 << 20
"""Bytes of a tensor that are there in two dtypes at a time."""
_READERS = 4  # threads with which transformers reads a checkpoint


class NoValues:
    """Stands for a weight that is replaced by a packed one, or whose rows stay on the drive, and takes no memory.
    transformers' loader takes such tensors."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype

    def __getitem__(self, index: Any) -> Tensor:
        return torch.zeros(1, dtype=self.dtype).expand(self.shape)

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return str(self.dtype)


class LazyTensor(NoValues):
    """A tensor of the checkpoint that is read when it is taken (`tensor[...]`), as `dtype`: some rows at a time where
    that is another one, so that it is never there in both. dtype None: as it is stored."""

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
    """`model.weights.Weights` of a blueprint with a whole outline. dense: the key of the packed dense layers in the
    store, None where all stay as the checkpoint has them: in a GGUF file's types. Packed layers are there at once:
    views of `files`, the store's where they are mapped, else read, through the page cache if `keep`. Tensors are read
    when they are asked for, each once."""

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
        paths = [*self._outline.tensors, *self._outline.tied]
        self._known = {".".join(names[:end]) for names in (path.split(".") for path in paths) for end in _ends(names)}
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
        key = embedding_key(self._blueprint) if self._on_disk else self._shared
        if key is not None:
            return EmbeddingOnDisk(self._blueprint.checkpoint, [key], self._blueprint.dtype)
        weight = self.tensor(f"{path}.weight")
        return lambda tokens: embedding(tokens, weight)

    def _bias(self, path: str) -> Tensor | None:
        return self.tensor(f"{path}.bias") if self.has(f"{path}.bias") else None

    def _read(self, path: str) -> Tensor:
        tensor = self._outline.tensors[path]
        assert tensor.key is not None
        values = LazyTensor(self._blueprint.checkpoint, tensor.key, tensor.read_as)[...]
        return values.to(tensor.dtype)


def read_dtypes(blueprint: Blueprint) -> dict[str, torch.dtype]:
    """Checkpoint key → the dtype that its parameter has in the model, of those that are taken as they are."""
    stored = blueprint.checkpoint.tensors
    return {
        tensor.key: tensor.read_as
        for tensor in blueprint.outline.tensors.values()
        if tensor.key is not None and tensor.read_as.is_floating_point and stored[tensor.key].dtype.is_floating_point
    }


def loading_needs(blueprint: Blueprint, dense: int, on_disk: bool = False) -> list[Need]:
    """Loading holds the `dense` bytes that stay and, at most, what is converted: of tensors that are taken as they are
    the rows that transformers' threads read at a time, of the others all that they are made of; nothing of tables that
    stay `on_disk`."""
    direct, stored = read_dtypes(blueprint), blueprint.checkpoint.tensors
    known = {*direct, *(table_keys(blueprint) if on_disk else ())}
    converted = sum(stored[key].nbytes for key in blueprint.dense_keys if key not in known)
    if any(stored[key].dtype != dtype for key, dtype in direct.items()):
        converted += _READERS * CONVERTED
    return [Need("dense", dense, Phase.LOADING), Need("conversion", converted, Phase.LOADING)]


def _ends(names: list[str]) -> range:
    return range(1, len(names) + 1)
