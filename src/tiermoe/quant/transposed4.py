"""Four bits with zero points as GPTQ and AWQ publish them: an input's codes beside each other. Kernels take those of an
output, so they are put in that order on their way into a slot; no code, zero point or scale changes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiermoe.errors import ConfigError, StoreError
from tiermoe.quant.encoding import Field
from tiermoe.quant.quantized import Quantizer

PREFIX = "transposed4/"

SCALES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the nibble of each of eight outputs lies in AWQ's words."""
_METHODS = ("gptq", "gptq_v2", "awq")
_IN_A_WORD = 8
_AT_ONCE = 1 << 18  # weights that are decoded at a time


@dataclass(frozen=True)
class Transposed4:
    """`matrices` one after the other, of equal rows. Stored: `qweight`, words of eight codes, of inputs (GPTQ) or of
    outputs (AWQ), `qzeros`, words of eight outputs' zero points, and `scales` (matrices, in_ / group, outputs). GPTQ's
    zero points are stored less 1, but in its second version. Slot: `codes` bytes (out, in_ / 2), the first of two in
    the low half, `scales` and `zeros` (out, in_ / group). A weight is (code - zero) * scale."""

    method: str
    scale: str
    group: int
    matrices: int = 1
    bits: int = 4

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.method}/{self.scale}/{self.group}/{self.matrices}"

    @property
    def label(self) -> str:
        """What people call it."""
        return self.method.partition("_")[0].upper()

    def stacked(self, count: int) -> Transposed4:
        """Of the rows of `count` such matrices, one after the other."""
        return replace(self, matrices=count * self.matrices)

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        """Raises StoreError for shapes that fill no whole words or groups."""
        rows = out // self.matrices
        if rows % _IN_A_WORD or in_ % _IN_A_WORD or in_ % self.group:
            raise StoreError(f"{out} x {in_} in {self.matrices} parts fill no whole words of {self.label}")
        words = (in_, rows // _IN_A_WORD) if self.method == "awq" else (in_ // _IN_A_WORD, rows)
        return (
            Field("qweight", torch.int32, (self.matrices, *words)),
            Field("qzeros", torch.int32, (self.matrices, in_ // self.group, rows // _IN_A_WORD)),
            Field("scales", SCALES[self.scale], (self.matrices, in_ // self.group, rows)),
        )

    def slot_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (
            Field("codes", torch.uint8, (out, in_ // 2)),
            Field("scales", SCALES[self.scale], (out, in_ // self.group)),
            Field("zeros", torch.uint8, (out, in_ // self.group)),
        )

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        """Raises ConfigError: such weights come quantised."""
        raise ConfigError(f"{self.label} is read from checkpoints and never packed: choose 8, 6, 4, 3 or 2 bits")

    def rows_apart(self, columns: int, quantizer: Quantizer) -> int | None:
        return None

    def widen(self, stored: Mapping[str, Tensor], slot: Mapping[str, Tensor]) -> None:
        """Puts the fields in the order of outputs."""
        rows = slot["codes"].shape[0] // self.matrices
        for index in range(self.matrices):
            its = slice(index * rows, (index + 1) * rows)
            slot["codes"][its] = self._pairs(stored["qweight"][index])
            slot["scales"][its] = stored["scales"][index].t()
            less = 1 if self.method == "gptq" else 0
            slot["zeros"][its] = self._outputs(stored["qzeros"][index]).t() + less

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        weight = torch.empty((out, in_), dtype=dtype)
        for first, rows in self.decoded(slot, in_):
            weight[first : first + rows.shape[0]] = rows
        return weight

    def decoded(self, slot: Mapping[str, Tensor], in_: int) -> Iterator[tuple[int, Tensor]]:
        """The weights in float32, some rows at a time: (first row, (rows, in_)). A product is rounded once."""
        codes, scales, zeros = (slot[name].cpu() for name in ("codes", "scales", "zeros"))
        some = max(1, _AT_ONCE // in_)
        for first in range(0, codes.shape[0], some):
            its = slice(first, first + some)
            values = torch.stack((codes[its] & 15, codes[its] >> 4), dim=-1).flatten(1).float()
            grouped = values.view(values.shape[0], -1, self.group)
            yield first, grouped.sub_(zeros[its, :, None].float()).mul_(scales[its, :, None].float()).flatten(1)

    def _pairs(self, words: Tensor) -> Tensor:
        """Bytes (rows, in_ / 2)."""
        if self.method != "awq":  # a word of inputs is four such bytes
            return words.t().contiguous().view(torch.uint8)
        codes = self._outputs(words)
        return (codes[0::2] | codes[1::2] << 4).t()

    def _outputs(self, words: Tensor) -> Tensor:
        """Words (n, rows / 8) of eight outputs as bytes (n, rows)."""
        places = _AWQ_PLACES if self.method == "awq" else range(_IN_A_WORD)
        return torch.stack([(words >> 4 * place & 15).to(torch.uint8) for place in places], dim=-1).flatten(1)


_NAME = re.compile(rf"{PREFIX}(\w+)/(\w+)/([1-9]\d*)/([1-9]\d*)")


def transposed4_encoding(name: str) -> Transposed4:
    """The encoding of a name like 'transposed4/gptq/f16/128/2'. Raises StoreError for others."""
    found = _NAME.fullmatch(name)
    if found is None or found[1] not in _METHODS or found[2] not in SCALES:
        raise StoreError(f"no kernel takes weights in {name!r}: take another checkpoint of the model")
    return Transposed4(found[1], found[2], int(found[3]), int(found[4]))
