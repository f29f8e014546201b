"""A packed matrix where it lies in an expert's slot, as one launch for several experts takes it (`triton_grouped`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SlotMatrix:
    """A packed matrix (rows, columns) in a slot. `codes`, `ladders`, `scale`, `zero`: where its fields begin, in bytes
    from the slot's first one, multiples of 16. bits 2 and 4: fields as `triton_linear.int2_linear` and `int4_linear`
    take them, `group` columns to a scale; bits 8: as `int8_linear` does, `group` and `zero` unused. 2 bits alone have
    ladders. `dtype` is that of scales and zeros."""

    rows: int
    columns: int
    bits: int
    group: int
    dtype: torch.dtype
    codes: int
    ladders: int
    scale: int
    zero: int
