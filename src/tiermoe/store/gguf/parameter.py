"""A parameter of a transformers model as a GGUF file holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tiermoe.quant.gguf import PREFIX, gguf_encoding
from tiermoe.store.gguf.header import GgufTensor

ReadBytes = Callable[[GgufTensor, int, int], Tensor]
"""(tensor, first, last) → a fresh uint8 tensor of its entries first..last - 1 along dimension 0."""

Change = Callable[[Tensor], Tensor]


class Parameter(Protocol):
    """shape: in the model. dtype: of the values that are read; float32 where the file holds blocks."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, read: ReadBytes, first: int, last: int) -> Tensor:
        """Its entries first..last - 1 along dimension 0, of `dtype`."""

    def encoding(self) -> str | None:
        """The name of the encoding of its rows; None where they lie in several types or in other rows than its own."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one tensor. order, columns: where each row and column of the parameter lies in it; None: in order.
    change: of values that the file has otherwise."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    order: Tensor | None = field(default=None, compare=False)
    columns: Tensor | None = field(default=None, compare=False)
    change: Change | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.kind.dtype or torch.float32

    def encoding(self) -> str:
        return encoding_of(self.tensor)

    def read(self, read: ReadBytes, first: int, last: int) -> Tensor:
        if self.tensor.shape[1:] == self.shape[1:]:
            values = decoded(self.tensor, self.blocks(read, first, last))
        else:  # the file dropped a dimension of size 1, or has one more
            rows = self.tensor.shape[0] if self.order is None else len(self.order)
            values = decoded(self.tensor, self.blocks(read, 0, rows)).view(self.shape)[first:last]
        if self.columns is not None:
            values = values[:, self.columns]
        return values if self.change is None else self.change(values)

    def blocks(self, read: ReadBytes, first: int, last: int) -> Tensor:
        """The bytes of rows, their columns as they lie: uint8 (last - first, …, bytes of a row)."""
        if self.order is None:
            return _in_rows(self.tensor, read(self.tensor, first, last))
        order = self.order[first:last]
        begin, end = int(order.min()), int(order.max()) + 1
        rows = read(self.tensor, begin, end).view(end - begin, -1)[order - begin]
        return _in_rows(self.tensor, rows.flatten())


@dataclass(frozen=True, slots=True)
class Stacked:
    """A matrix, or a bias, of every expert: the rows of each of `tensors`, all (experts, rows, …), one after the
    other."""

    tensors: tuple[GgufTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        experts, _, *columns = self.tensors[0].shape
        return (experts, sum(tensor.shape[1] for tensor in self.tensors), *columns)

    @property
    def dtype(self) -> torch.dtype:
        dtypes = {tensor.kind.dtype or torch.float32 for tensor in self.tensors}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def encoding(self) -> str | None:
        names = {encoding_of(tensor) for tensor in self.tensors}
        return names.pop() if len(names) == 1 else None

    def read(self, read: ReadBytes, first: int, last: int) -> Tensor:
        parts = [decoded(tensor, _in_rows(tensor, read(tensor, first, last))) for tensor in self.tensors]
        return torch.cat([part.to(self.dtype) for part in parts], dim=1)


@dataclass(frozen=True, slots=True)
class Expanding:
    """What expands DeepSeek's latent to keys and values, a head after the other. llama.cpp's converter keeps the keys'
    part (heads, latent, columns), transposed, apart from the values' (heads, columns, latent)."""

    keys: GgufTensor
    values: GgufTensor

    @property
    def shape(self) -> tuple[int, ...]:
        heads, latent, columns = self.keys.shape
        return (heads * (columns + self.values.shape[1]), latent)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def encoding(self) -> str | None:
        return None

    def read(self, read: ReadBytes, first: int, last: int) -> Tensor:
        heads = self.keys.shape[0]
        rows = self.shape[0] // heads
        begin, end = first // rows, -(-last // rows)
        keys = decoded(self.keys, _in_rows(self.keys, read(self.keys, begin, end))).float()
        values = decoded(self.values, _in_rows(self.values, read(self.values, begin, end))).float()
        both = torch.cat((keys.swapaxes(1, 2), values), dim=1).flatten(0, 1)
        return both[first - begin * rows : last - begin * rows]


def encoding_of(tensor: GgufTensor) -> str:
    """The name of the encoding of a tensor's rows: 'plain' for numbers that are values of their own."""
    return "plain" if tensor.kind.dtype is not None else PREFIX + tensor.kind.name.lower()


def decoded(tensor: GgufTensor, rows: Tensor) -> Tensor:
    """The values of rows (…, bytes of a row) of a tensor: float32 of blocks, else as they are."""
    if tensor.kind.dtype is not None:
        return rows.view(tensor.kind.dtype)
    columns = tensor.shape[-1]
    flat = rows.reshape(-1, rows.shape[-1])
    values = gguf_encoding(tensor.kind.name).decode({"blocks": flat}, len(flat), columns, torch.float32)
    return values.view(*rows.shape[:-1], columns)


def _in_rows(tensor: GgufTensor, raw: Tensor) -> Tensor:
    """Bytes of entries along dimension 0 as (entries, …, bytes of a row)."""
    if len(tensor.shape) == 1:
        return raw
    return raw.view(-1, *tensor.shape[1:-1], tensor.row_bytes)
