"""2 bits: as 4 bits (`int4`), with codes of 2 bits; 2.5 bits a weight in groups of 64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tiermoe.formats.int4 import Int4, RowMajorInt4


@dataclass(frozen=True)
class Int2(Int4):
    """2 bits for CPUs: w = (code - 2) * scale + zero, code 0..3; two columns share a nibble of the CPUs' order."""

    bits: ClassVar[int] = 2
    kind: ClassVar[str] = "u2"


@dataclass(frozen=True)
class RowMajorInt2(RowMajorInt4):
    """2 bits for GPUs: the very weights of Int2. Byte j of a row holds the codes of columns 4 j .. 4 j + 3, the first
    column's in its lowest bits."""

    bits: ClassVar[int] = 2
    kind: ClassVar[str] = "u2"
