"""Codes and scales as publishers' safetensors have them, used as they lie."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiermoe.errors import ConfigError, StoreError
from tiermoe.quant.encoding import Field, SameInSlot
from tiermoe.quant.quantized import Quantizer

PREFIX = "published/"

CODES = {"e2m1": 4, "s4": 4, "e4m3": 8}
"""Kind of code → its bits. Of 4 bits two lie in a byte, the first in its low half. `e2m1` and `e4m3` are floats of so
many bits of exponent and mantissa, `s4` is an integer less 8."""

SCALES = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "e8m0": torch.uint8,
    "e4m3-times": torch.uint8, "e4m3-over": torch.uint8,
}  # fmt: skip
"""Kind of scale → what it is read as. `e8m0` stands for 2^(byte - 127), `e4m3` for a float of 8 bits times a factor, or
divided by it."""

_LABELS = {"e2m1": "MXFP4", "s4": "INT4", "e4m3": "FP8"}
_E4M3 = "e4m3-"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_DECODED_WEIGHTS = 1 << 18  # that are decoded at a time


@dataclass(frozen=True)
class Published(SameInSlot):
    """Fields `codes`, bytes (out, in_ / 2) or (out, in_), and `scales` (out / rows, in_ / columns), rounded up: `rows`
    by `columns` weights share a scale. A weight is the product of both. `matrices` of equal rows have a factor each, in
    the field `factors`, float32; 0: there is none."""

    codes: str
    scale: str
    rows: int
    columns: int
    matrices: int = 0

    @property
    def name(self) -> str:
        factors = f"/{self.matrices}" if self.matrices else ""
        return f"{PREFIX}{self.codes}/{self.scale}/{self.rows}x{self.columns}{factors}"

    @property
    def label(self) -> str:
        """What people call it."""
        return "NVFP4" if self.matrices else _LABELS[self.codes]

    def stacked(self, count: int) -> Published:
        """Of the rows of `count` such matrices, one after the other."""
        return replace(self, matrices=count * self.matrices)

    @property
    def bits(self) -> int:
        return CODES[self.codes]

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        """Raises StoreError where a row's codes fill no whole bytes."""
        if in_ * self.bits % 8:
            raise StoreError(f"a row of {in_} columns at {self.bits} bits fills no whole bytes")
        return (
            Field("codes", torch.uint8, (out, in_ * self.bits // 8)),
            Field("scales", SCALES[self.scale], (-(-out // self.rows), -(-in_ // self.columns))),
            *((Field("factors", torch.float32, (self.matrices,)),) if self.matrices else ()),
        )

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        """Raises ConfigError: such weights come quantised."""
        raise ConfigError(f"{self.label} is read from checkpoints and never packed: choose 8, 6, 4, 3 or 2 bits")

    def rows_apart(self, columns: int, quantizer: Quantizer) -> int | None:
        return self.rows

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        weight = torch.empty((out, in_), dtype=dtype)
        for first, rows in self.decoded(slot, in_):
            weight[first : first + rows.shape[0]] = rows
        return weight

    def decoded(self, slot: Mapping[str, Tensor], in_: int) -> Iterator[tuple[int, Tensor]]:
        """The weights in float32, some rows at a time: (first row, (rows, in_)). A product is rounded once."""
        codes, some = slot["codes"].cpu(), max(1, _DECODED_WEIGHTS // in_)
        scales = self._scales({name: values.cpu() for name, values in slot.items()})
        for first in range(0, codes.shape[0], some):
            values = self._values(codes[first : first + some])
            of_rows = scales[torch.arange(first, first + values.shape[0]) // self.rows]
            yield first, values.mul_(of_rows.repeat_interleave(self.columns, 1)[:, :in_])

    def _values(self, codes: Tensor) -> Tensor:
        if self.codes == "e4m3":
            return codes.view(torch.float8_e4m3fn).float()
        pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
        if self.codes == "s4":
            return pairs.float() - 8
        sizes = torch.tensor(_E2M1)
        return torch.cat((sizes, -sizes))[pairs.int()]

    def _scales(self, slot: Mapping[str, Tensor]) -> Tensor:
        scales = slot["scales"]
        if self.scale == "e8m0":
            return torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
        if not self.matrices:
            return scales.float()
        factors = slot["factors"].repeat_interleave(-(-len(scales) // self.matrices))[: len(scales), None]
        values = scales.view(torch.float8_e4m3fn).float()
        return values * factors if self.scale == "e4m3-times" else values / factors


_NAME = re.compile(rf"{PREFIX}(\w+)/([\w-]+)/([1-9]\d*)x([1-9]\d*)(?:/([1-9]\d*))?")


def published_encoding(name: str) -> Published:
    """The encoding of a name like 'published/e4m3/f32/128x128'. Raises StoreError for others."""
    found = _NAME.fullmatch(name)
    known = found is not None and found[1] in CODES and found[2] in SCALES
    if found is None or not known or found[2].startswith(_E4M3) != (found[5] is not None):
        raise StoreError(f"no kernel takes weights in {name!r}: take another checkpoint of the model")
    return Published(found[1], found[2], int(found[3]), int(found[4]), int(found[5] or 0))
