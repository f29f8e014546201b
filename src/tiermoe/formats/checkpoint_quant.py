"""Encodings in which publishers quantise safetensors checkpoints: MXFP4, NVFP4, FP8, INT4, GPTQ and AWQ.

`CheckpointQuant`: codes and scales row by row, used as they are in the file. `Transposed4`: GPTQ's and AWQ's 4 bits
with zero points. Their codes of one input are beside each other and kernels take those of one output, so that the
fields are put in that order on the way into a slot; no code, zero point or scale changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.errors import StoreError
from tiermoe.formats.encoding import DECODED_WEIGHTS, Field, FixedEncoding, InC, OfMatrices
from tiermoe.native import ScaleKind

PREFIX = "published/"
TRANSPOSED = "transposed4/"

CODES = {"e2m1": 4, "s4": 4, "e4m3": 8}
"""Kind of code → its bits. Two codes of 4 bits share a byte, the first in its low half. `e2m1` and `e4m3` are floats of
so many bits of exponent and mantissa, `s4` is an integer less 8."""

SCALES = {
    "f32": (torch.float32, ScaleKind.FLOAT), "bf16": (torch.bfloat16, ScaleKind.BF16),
    "f16": (torch.float16, ScaleKind.HALF), "e8m0": (torch.uint8, ScaleKind.E8M0),
    "e4m3-times": (torch.uint8, ScaleKind.E4M3_TIMES), "e4m3-over": (torch.uint8, ScaleKind.E4M3_OVER),
}  # fmt: skip
"""Kind of scale → the dtype that it is read as, and what C calls it. `e8m0` stands for 2^(byte - 127), `e4m3` for a
float of 8 bits times a factor, or divided by it."""

_LABELS = {"e2m1": "MXFP4", "s4": "INT4", "e4m3": "FP8"}
_E4M3 = "e4m3-"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_METHODS = ("gptq", "gptq_v2", "awq")
_WORD_SCALES = ("f16", "bf16", "f32")  # that GPTQ and AWQ have
_IN_A_WORD = 8  # codes
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where the nibble of each of eight outputs is in AWQ's words


@dataclass(frozen=True)
class CheckpointQuant(OfMatrices, FixedEncoding):
    """Codes and scales, whose product is the weight.

    Fields: `codes`, bytes (out, in_ / 2) or (out, in_); `scales` (out / rows, in_ / columns), rounded up; where there
    are factors, `factors` (matrices), float32."""

    codes: str  # of `CODES`
    scale: str  # of `SCALES`
    rows: int  # that share a scale
    columns: int  # that share a scale
    matrices: int = 0  # of equal rows, one after the other, each with a factor; 0: no factors

    @property
    def name(self) -> str:
        factors = f"/{self.matrices}" if self.matrices else ""
        return f"{PREFIX}{self.codes}/{self.scale}/{self.rows}x{self.columns}{factors}"

    @property
    def label(self) -> str:
        return "NVFP4" if self.matrices else _LABELS[self.codes]

    @property
    def bits(self) -> int:
        return CODES[self.codes]

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        """Raises StoreError where a row's codes fill no whole bytes."""
        if in_ * self.bits % 8:
            raise StoreError(f"a row of {in_} columns at {self.bits} bits fills no whole bytes")
        return (
            Field("codes", torch.uint8, (out, in_ * self.bits // 8)),
            Field("scales", SCALES[self.scale][0], (-(-out // self.rows), -(-in_ // self.columns))),
            *((Field("factors", torch.float32, (self.matrices,)),) if self.matrices else ()),
        )

    def decoded(self, slot: Mapping[str, Tensor], in_: int) -> Iterator[tuple[int, Tensor]]:
        codes, some = slot["codes"].cpu(), max(1, DECODED_WEIGHTS // in_)
        scales = self._scales({name: values.cpu() for name, values in slot.items()})
        for first in range(0, codes.shape[0], some):
            values = self._values(codes[first : first + some])
            of_rows = scales[torch.arange(first, first + values.shape[0]) // self.rows]
            yield first, values.mul_(of_rows.repeat_interleave(self.columns, 1)[:, :in_])

    def in_c(self, out: int, in_: int) -> InC | None:
        factors = max(1, out // max(1, self.matrices))
        return _in_c(self.codes.upper(), in_, (SCALES[self.scale][1], self.rows, self.columns, factors), "factors")

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


@dataclass(frozen=True)
class Transposed4(OfMatrices, FixedEncoding):
    """GPTQ's and AWQ's 4 bits: w = (code - zero) * scale.

    Stored fields: `qweight`, words of eight codes, of inputs (GPTQ) or of outputs (AWQ); `qzeros`, words of eight
    outputs' zero points, which GPTQ stores less 1, but in its second version; `scales` (matrices, in_ / group,
    outputs). Slot fields: `codes`, bytes (out, in_ / 2), the first of two codes in the low half; `scales` and `zeros`
    (out, in_ / group)."""

    method: str  # gptq, gptq_v2 or awq
    scale: str  # f16, bf16 or f32, of `SCALES`
    group: int  # inputs that share a scale
    matrices: int = 1  # of equal rows, one after the other
    bits: int = 4

    @property
    def name(self) -> str:
        return f"{TRANSPOSED}{self.method}/{self.scale}/{self.group}/{self.matrices}"

    @property
    def label(self) -> str:
        return self.method.partition("_")[0].upper()

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        """Raises StoreError for shapes that fill no whole words or groups."""
        rows = out // self.matrices
        if rows % _IN_A_WORD or in_ % _IN_A_WORD or in_ % self.group:
            raise StoreError(f"{out} x {in_} in {self.matrices} parts fill no whole words of {self.label}")
        words = (in_, rows // _IN_A_WORD) if self.method == "awq" else (in_ // _IN_A_WORD, rows)
        return (
            Field("qweight", torch.int32, (self.matrices, *words)),
            Field("qzeros", torch.int32, (self.matrices, in_ // self.group, rows // _IN_A_WORD)),
            Field("scales", SCALES[self.scale][0], (self.matrices, in_ // self.group, rows)),
        )

    def slot_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (
            Field("codes", torch.uint8, (out, in_ // 2)),
            Field("scales", SCALES[self.scale][0], (out, in_ // self.group)),
            Field("zeros", torch.uint8, (out, in_ // self.group)),
        )

    def widen(self, stored: Mapping[str, Tensor], slot: Mapping[str, Tensor]) -> None:
        """Puts the fields in the order of outputs."""
        rows = slot["codes"].shape[0] // self.matrices
        for index in range(self.matrices):
            part = slice(index * rows, (index + 1) * rows)
            slot["codes"][part] = self._pairs(stored["qweight"][index])
            slot["scales"][part] = stored["scales"][index].t()
            less = 1 if self.method == "gptq" else 0
            slot["zeros"][part] = self._outputs(stored["qzeros"][index]).t() + less

    def decoded(self, slot: Mapping[str, Tensor], in_: int) -> Iterator[tuple[int, Tensor]]:
        codes, scales, zeros = (slot[name].cpu() for name in ("codes", "scales", "zeros"))
        some = max(1, DECODED_WEIGHTS // in_)
        for first in range(0, codes.shape[0], some):
            part = slice(first, first + some)
            values = torch.stack((codes[part] & 15, codes[part] >> 4), dim=-1).flatten(1).float()
            grouped = values.view(values.shape[0], -1, self.group)
            yield first, grouped.sub_(zeros[part, :, None].float()).mul_(scales[part, :, None].float()).flatten(1)

    def in_c(self, out: int, in_: int) -> InC | None:
        return _in_c("U4", in_, (SCALES[self.scale][1], 1, self.group, out), "zeros")

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


def _in_c(coding: str, in_: int, published: tuple[ScaleKind, int, int, int], others: str) -> InC | None:
    """Where a group of 16 or 32 columns has one scale."""
    columns = published[2]
    group = 16 if columns == 16 else 32
    whole = columns % group == 0 or columns >= in_
    fits = whole and (group == 32 or coding == "E2M1")
    return InC(coding, group, "codes", "scales", others, published) if fits else None


_CODES_NAME = re.compile(rf"{PREFIX}(\w+)/([\w-]+)/([1-9]\d*)x([1-9]\d*)(?:/([1-9]\d*))?")


def checkpoint_quant_encoding(name: str) -> CheckpointQuant:
    """The encoding of a name like 'published/e4m3/f32/128x128'. Raises StoreError for others."""
    found = _CODES_NAME.fullmatch(name)
    known = found is not None and found[1] in CODES and found[2] in SCALES
    if found is None or not known or found[2].startswith(_E4M3) != (found[5] is not None):
        raise StoreError(f"no kernel takes weights in {name!r}: take another checkpoint of the model")
    return CheckpointQuant(found[1], found[2], int(found[3]), int(found[4]), int(found[5] or 0))


_WORDS_NAME = re.compile(rf"{TRANSPOSED}(\w+)/(\w+)/([1-9]\d*)/([1-9]\d*)")


def transposed4_encoding(name: str) -> Transposed4:
    """The encoding of a name like 'transposed4/gptq/f16/128/2'. Raises StoreError for others."""
    found = _WORDS_NAME.fullmatch(name)
    if found is None or found[1] not in _METHODS or found[2] not in _WORD_SCALES:
        raise StoreError(f"no kernel takes weights in {name!r}: take another checkpoint of the model")
    return Transposed4(found[1], found[2], int(found[3]), int(found[4]))
