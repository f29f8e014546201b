"""How one matrix lies in the store and in a memory slot: the interface of all encodings."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tiermoe.quant.quantized import Quantizer

COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Field:
    """One tensor of an encoded matrix; dense, in C order. `rows_at`: the dimension that counts the matrix's rows."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows_at: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Encoding(Protocol):
    """One way to hold a matrix of `out` rows and `in_` columns; `dtype` is the model's compute dtype.

    Stored fields are what an extent of the store holds, slot fields what a kernel reads. Where they are
    equal, a load is a read into the slot; where they differ, `widen` makes the second from the first."""

    @property
    def name(self) -> str:
        """Names kind, layout and group, e.g. ``int4/cpu-avx512/g64``; recorded in the store."""
        ...

    @property
    def bits(self) -> int:
        """16 (the checkpoint's own), 8, 6, 4, 3 or 2; of a GGUF file's blocks also 5."""
        ...

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]: ...

    def slot_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]: ...

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        """The stored fields of `weight` (N, K), any floating dtype."""
        ...

    def rows_apart(self, columns: int, quantizer: Quantizer) -> int | None:
        """Blocks of rows are encoded as in the whole matrix where they begin at multiples of so many rows; None: the
        matrix is encoded whole."""
        ...

    def widen(self, stored: Mapping[str, Tensor], slot: Mapping[str, Tensor]) -> None:
        """Writes the slot fields from the stored ones; does nothing where the two are equal."""
        ...

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        """The weights (N, K) that the slot fields stand for, in `dtype`; may be a transposed view."""
        ...


class SameInSlot(ABC):
    """For encodings whose kernel reads the fields as they are stored."""

    @abstractmethod
    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]: ...

    def slot_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return self.stored_fields(out, in_, dtype)

    def widen(self, stored: Mapping[str, Tensor], slot: Mapping[str, Tensor]) -> None:
        return None
