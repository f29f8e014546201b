"""Encoding of one matrix, in a file and in a memory slot: the interface of all encodings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from tiermoe import native
from tiermoe.errors import ConfigError
from tiermoe.formats.quantizers import Quantizer

COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

BLOCK_ROWS = 64
"""A matrix has a multiple of them in `RowBlocks`."""

DECODED_WEIGHTS = 1 << 18
"""Weights that `FixedEncoding.decoded` gives at a time: bounds the float32 temporaries."""


@dataclass(frozen=True)
class Field:
    """One tensor of an encoded matrix, dense and in C order."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows_at: int = 0  # the dimension that counts the matrix's rows

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class InC:
    """How the kernels in C take a matrix in an encoding."""

    coding: str  # of `EACH_QUANT` in native/quants.h
    group: int  # columns of a row that share a scale: all of them at our 8 and 16 bits
    weights: str  # the slot's fields: the codes,
    scales: str | None = None
    others: str | None = None  # and factors or zeros
    # of published codes: what scales are, rows and columns that share one, rows that share a factor
    published: tuple[native.ScaleKind, int, int, int] = (native.ScaleKind.FLOAT, 1, 1, 1)


Squares = tuple[float, float]
"""Sums of squares: of the difference between weights and what their codes stand for, and of the weights."""

Encoded = tuple[Mapping[str, Tensor], Squares]
"""Stored fields, codes among them in buffers that the thread's next call uses again, and squares."""


class Encoding(Protocol):
    """Encoding of a matrix of `out` rows and `in_` columns; `dtype` is the model's compute dtype.

    An extent of the store has the stored fields; a kernel reads the slot fields. Where both are equal, a load is a read
    into the slot; otherwise `widen` writes the slot fields from the stored ones."""

    @property
    def name(self) -> str:
        """Kind, layout and group, e.g. ``int4/cpu-avx512/g64``; the store records it."""
        ...

    @property
    def bits(self) -> int:
        """16 (the checkpoint's own), 8, 6, 4, 3 or 2; blocks of a GGUF file also have 5."""
        ...

    def __hash__(self) -> int: ...

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]: ...

    def slot_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]: ...

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        """The stored fields of `weight` (N, K), any floating dtype."""
        ...

    def row_multiple(self, columns: int, quantizer: Quantizer) -> int | None:
        """A block of rows that begins at a multiple of this number is encoded as it is in the whole matrix. None: the
        matrix has to be encoded whole."""
        ...

    def widen(self, stored: Mapping[str, Tensor], slot: Mapping[str, Tensor]) -> None:
        """Writes the slot fields from the stored ones; does nothing where both are equal."""
        ...

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        """The weights (N, K) that the slot fields stand for, in `dtype`; may be a transposed view."""
        ...

    def in_c(self, out: int, in_: int) -> InC | None:
        """How the kernels in C take a matrix (out, in_), if it has a shape for them; None: torch computes."""
        ...


class SameInSlot(ABC):
    """Base of encodings whose kernel reads the fields as they are stored."""

    @abstractmethod
    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]: ...

    def slot_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return self.stored_fields(out, in_, dtype)

    def widen(self, stored: Mapping[str, Tensor], slot: Mapping[str, Tensor]) -> None:
        return None

    def in_c(self, out: int, in_: int) -> InC | None:
        return None


class EncodedInC(ABC):
    """Base of encodings whose rows C encodes: a multiple of 16 columns, from and for dtypes of `native.WEIGHTS`."""

    @abstractmethod
    def encode_in_c(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> Encoded:
        """As `Encoding.encode`, with the same bytes."""


class RowBlocks(SameInSlot):
    """Base class of encodings whose blocks of `BLOCK_ROWS` rows are decoded independently."""

    def row_multiple(self, columns: int, quantizer: Quantizer) -> int | None:
        return BLOCK_ROWS

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        return self.decode_rows(slot, 0, out, in_, dtype, torch.empty(out * in_, dtype=dtype))

    @abstractmethod
    def decode_rows(
        self, slot: Mapping[str, Tensor], first: int, last: int, in_: int, dtype: torch.dtype, into: Tensor
    ) -> Tensor:
        """The weights of rows first..last - 1, a whole number of blocks: a transposed view (last - first, in_) of
        `into`, a buffer of so many values of `dtype`."""


class FixedEncoding(SameInSlot):
    """Base of encodings in which weights are published: tiermoe reads them and never packs them."""

    read_from: ClassVar[str] = "checkpoints"

    @property
    @abstractmethod
    def label(self) -> str:
        """The usual name: 'Q4_K', 'MXFP4'."""

    @abstractmethod
    def decoded(self, slot: Mapping[str, Tensor], in_: int) -> Iterator[tuple[int, Tensor]]:
        """The weights in float32, some rows at a time: (first row, (rows, in_)). A product is rounded once."""

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        """Raises ConfigError: such weights are quantised already."""
        raise ConfigError(f"{self.label} is read from {self.read_from} and never packed: choose 8, 6, 4, 3 or 2 bits")

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        weight = torch.empty((out, in_), dtype=dtype)
        for first, rows in self.decoded(slot, in_):
            weight[first : first + rows.shape[0]] = rows
        return weight
