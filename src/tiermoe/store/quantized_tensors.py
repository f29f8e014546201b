"""Tensors of a safetensors checkpoint that comes quantised, by what they stand for: codes and scales are one tensor, by
the name and of the shape that its values have in a checkpoint of the model that is not quantised."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tiermoe.quant.published import Published
from tiermoe.quant.transposed4 import Transposed4
from tiermoe.store.entry import TensorEntry

ReadRows = Callable[[TensorEntry, int, int], Tensor]
"""(tensor, first, last) → its entries first..last - 1 along dimension 0."""


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """fields: of the encoding, as they lie. The values are float32 of `shape`: one matrix, or one an expert. turned: a
    matrix's rows are the columns of the values, as transformers has them for gpt-oss."""

    encoding: Published | Transposed4
    fields: Mapping[str, TensorEntry]
    shape: tuple[int, ...]
    turned: bool = False
    dtype: torch.dtype = field(default=torch.float32, init=False)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def out_in(self) -> tuple[int, int]:
        """Rows and columns of a matrix."""
        rows, columns = self.shape[-2:]
        return (columns, rows) if self.turned else (rows, columns)

    def values(self, read: ReadRows, first: int, last: int) -> Tensor:
        """The values first..last - 1 along dimension 0."""
        if len(self.shape) == 2:
            return self._rows(read, first, last)
        out, in_ = self.out_in
        found = torch.empty((last - first, *self.shape[1:]), dtype=self.dtype)
        for expert in range(first, last):
            raw = {name: read(entry, expert, expert + 1) for name, entry in self.fields.items()}
            weight = self.encoding.decode(self.slot(raw, out), out, in_, self.dtype)
            found[expert - first] = weight.t() if self.turned else weight
        return found

    def slot(self, raw: Mapping[str, Tensor], out: int) -> dict[str, Tensor]:
        """The slot's fields of `out` rows from the tensors that were read of them."""
        in_, encoding = self.out_in[1], self.encoding
        stored = {
            each.name: raw[each.name].flatten().view(torch.uint8).view(each.dtype).view(each.shape)
            for each in encoding.stored_fields(out, in_, self.dtype)
        }
        if isinstance(encoding, Published):
            return stored
        slot = {
            each.name: torch.empty(each.shape, dtype=each.dtype) for each in encoding.slot_fields(out, in_, self.dtype)
        }
        encoding.widen(stored, slot)
        return slot

    def _rows(self, read: ReadRows, first: int, last: int) -> Tensor:
        """Whole blocks of rows that share scales, less what is before `first`; all where rows lie in columns."""
        if isinstance(self.encoding, Transposed4):
            out, in_ = self.out_in
            raw = {name: read(entry, 0, entry.shape[0]) for name, entry in self.fields.items()}
            return self.encoding.decode(self.slot(raw, out), out, in_, self.dtype)[first:last]
        together = self.encoding.rows
        begin, one = first // together * together, together >= self.shape[0]
        begin, scales = (first, (0, 1)) if one else (begin, (begin // together, -(-last // together)))
        spans = {"codes": (begin, last), "scales": scales, "factors": (0, 1)}
        raw = {name: read(entry, *spans[name]) for name, entry in self.fields.items()}
        weight = self.encoding.decode(self.slot(raw, last - begin), last - begin, self.shape[1], self.dtype)
        return weight[first - begin :]


Entries = dict[str, TensorEntry | QuantizedTensor]
