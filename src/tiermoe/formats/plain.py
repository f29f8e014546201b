"""Weights that are plain values, and matrices whose halves have two encodings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiermoe.errors import ConfigError, StoreError
from tiermoe.formats.encoding import DECODED_WEIGHTS, FLOATS, Encoding, Field, FixedEncoding, InC, SameInSlot
from tiermoe.formats.quantizers import Quantizer

VALUES, HALVES = "values/", "halves/"
_BETWEEN = "|"


@dataclass(frozen=True)
class Plain(SameInSlot):
    """The checkpoint's own weights, "16 bits": field `weight` (N, K) in the compute dtype, for which no quantizer is
    used."""

    name: str = "plain"
    bits: int = 16

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (Field("weight", dtype, (out, in_)),)

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"weight": weight.to(dtype).contiguous()}

    def row_multiple(self, columns: int, quantizer: Quantizer) -> int | None:
        return 1

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        return slot["weight"].to(dtype)

    def in_c(self, out: int, in_: int) -> InC | None:
        return InC("BF16", in_, "weight")


@dataclass(frozen=True)
class Values(FixedEncoding):
    """Values of a checkpoint in another dtype than the compute dtype: field `weight` (out, in_) in `dtype`."""

    dtype: torch.dtype
    bits: int = 16

    @property
    def label(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def name(self) -> str:
        return VALUES + self.label

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (Field("weight", self.dtype, (out, in_)),)

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        return slot["weight"].to(dtype)

    def decoded(self, slot: Mapping[str, Tensor], in_: int) -> Iterator[tuple[int, Tensor]]:
        weight, some = slot["weight"].cpu(), max(1, DECODED_WEIGHTS // in_)
        for first in range(0, weight.shape[0], some):
            yield first, weight[first : first + some].float()


@dataclass(frozen=True)
class Halves(SameInSlot):
    """The first half of the rows in one encoding, the second half in another. Fields: those of both encodings, called
    `0.…` and `1.…`."""

    first: Encoding
    second: Encoding

    @property
    def name(self) -> str:
        return f"{HALVES}{self.first.name}{_BETWEEN}{self.second.name}"

    @property
    def label(self) -> str:
        """The name that people use: 'Q4_K and Q5_K'."""
        return " and ".join(str(getattr(half, "label", half.name)) for half in (self.first, self.second))

    @property
    def bits(self) -> int:
        return max(self.first.bits, self.second.bits)

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return tuple(
            replace(field, name=f"{index}.{field.name}")
            for index, half in enumerate((self.first, self.second))
            for field in half.stored_fields(out // 2, in_, dtype)
        )

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        """Raises ConfigError: such weights are used where they are."""
        raise ConfigError("two encodings in one matrix are never packed: choose 8, 6, 4, 3 or 2 bits")

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        return torch.cat([half.decode(fields, out // 2, in_, dtype) for half, fields in self.of(slot)])

    def of(self, slot: Mapping[str, Tensor]) -> list[tuple[Encoding, dict[str, Tensor]]]:
        """Both encodings, each with its fields of a slot."""
        return [
            (half, {name[2:]: value for name, value in slot.items() if name.startswith(f"{index}.")})
            for index, half in enumerate((self.first, self.second))
        ]


def values_encoding(name: str) -> Values:
    """The encoding of a name like 'values/float32'. Raises StoreError for others."""
    dtype = FLOATS.get(name.removeprefix(VALUES))
    if dtype is None:
        raise StoreError(f"no kernel takes weights in {name!r}: take another checkpoint of the model")
    return Values(dtype)


def halves_encoding(name: str, named: Callable[[str], Encoding]) -> Halves:
    """The encoding of a name like 'halves/gguf/q4_k|gguf/q5_k'. `named`: gives the encoding of each half's name. Raises
    StoreError as `named` does, and where the name has no two halves."""
    names = name.removeprefix(HALVES).split(_BETWEEN)
    if len(names) != 2:
        raise StoreError(f"{name!r} names no two encodings: take another checkpoint of the model")
    return Halves(named(names[0]), named(names[1]))
