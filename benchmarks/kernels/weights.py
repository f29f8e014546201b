"""Packed weights that do not fit a cache, taken in turn, so that every product reads them from memory."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tiermoe.kernels import machine_layout
from tiermoe.process.bandwidth import last_cache_bytes
from tiermoe.quant.int4 import Int4
from tiermoe.quant.quantizers import QUANTIZERS
from tiermoe.quant.registry import encoding_for

Fields = dict[str, torch.Tensor]

_CACHES, _LEAST, _MOST = 4, 64 << 20, 1 << 30


def enough_bytes() -> int:
    """Four times the last cache, 64 MiB at least and 1 GiB at most."""
    return min(max(_CACHES * (last_cache_bytes() or 0), _LEAST), _MOST)


def packed(out: int, in_: int, seed: int = 0) -> tuple[Int4, Fields]:
    """A random matrix (out, in_) in 4 bits in this machine's order. ValueError for sizes that are not packed so."""
    encoding = encoding_for(4, out, in_, torch.bfloat16, machine_layout("cpu"))
    if not isinstance(encoding, Int4):
        raise ValueError(f"({out}, {in_}) is not packed at 4 bits; use multiples of 64")
    return encoding, encoding.encode(random(out, in_, seed) * in_**-0.5, QUANTIZERS["linear"], torch.bfloat16)


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Standard normal (rows, columns) in bfloat16."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def copy(fields: Mapping[str, torch.Tensor]) -> Fields:
    """The same values at another place."""
    return {name: field.clone() for name, field in fields.items()}


def nbytes(fields: Mapping[str, torch.Tensor]) -> int:
    """Packed bytes."""
    return sum(field.nbytes for field in fields.values())


class Turns:
    """Hands out `items` one after the other, from the first again after the last: what was used last comes last."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items
        self._next = 0

    def take(self, count: int) -> Iterator[Any]:
        """The next `count`."""
        for _ in range(count):
            yield self._items[self._next]
            self._next = (self._next + 1) % len(self._items)
