"""2 bits with quantized scales, widened to the 8-bit format while loading.

HQQ at 2 bits with groups of 16 and 8-bit scales (the configuration of CORM): with 16-bit scales and offsets
a group of 16 would cost 2 bits a weight for its parameters alone. Here step and offset of a group are 8-bit
multiples of one scale per row: 3 bits a weight in all, and a widened weight is an integer of 8 bits, which
the 8-bit operator takes without any further rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tiermoe.quant.encoding import Field
from tiermoe.quant.int8 import Int8
from tiermoe.quant.quantized import Quantizer, nearest_codes

GROUP = 16
LARGEST = 3
BLOCK_WORDS = 1 << 16  # int32 words widened at a time: the temporary stays in the second cache


@dataclass(frozen=True)
class Int2:
    """Stored: `codes` uint8 (N, K / 4), `step` uint8 and `offset` int8 (N, K / 16), `scale` (N);
    w = scale * (step * code + offset). Slot: the fields of Int8, with `weight` = step * code + offset.

    Group g of a row of K = 16 G weights holds the columns 4 g .. 4 g + 3 of each quarter of the row. Its 16
    codes are one 32-bit word: bits 2 i and 2 i + 1 of byte j belong to column 4 g + j of quarter i. So a
    quarter of the row is one shift and one mask of the row's words, and the words, steps and offsets of its
    groups stand in the same order."""

    name: str = "int2/g16"
    bits: ClassVar[int] = 2
    _slot: ClassVar[Int8] = Int8()

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        groups = in_ // GROUP
        return (
            Field("codes", torch.uint8, (out, in_ // 4)),
            Field("step", torch.uint8, (out, groups)),
            Field("offset", torch.int8, (out, groups)),
            Field("scale", dtype, (out,)),
        )

    def slot_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return self._slot.stored_fields(out, in_, dtype)

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        rows, columns = weight.shape
        groups = columns // GROUP
        ordered = weight.reshape(rows, 4, groups, 4).transpose(1, 2).reshape(rows, columns)
        found = quantizer(ordered, self.bits, GROUP)
        scale = _row_scale(found.scale, found.offset).to(dtype)
        unit = torch.where(scale == 0, torch.inf, scale.float())
        step = (found.scale / unit).round_().clamp_(1, 255 // LARGEST)
        offset = torch.minimum((found.offset / unit).round_().clamp_(min=-128), 127 - LARGEST * step)
        row = scale.float()
        codes = nearest_codes(ordered, step * row, offset * row, 0, LARGEST, torch.uint8)
        return {
            "codes": _pack(codes.view(rows, groups, GROUP)),
            "step": step.to(torch.uint8),
            "offset": offset.to(torch.int8),
            "scale": scale.view(-1),
        }

    def widen(self, stored: Mapping[str, Tensor], slot: Mapping[str, Tensor]) -> None:
        slot["scale"].copy_(stored["scale"])
        words = stored["codes"].view(torch.int32)
        rows, groups = words.shape
        quarters = slot["weight"].view(torch.int32).view(rows, 4, groups)
        block = max(1, BLOCK_WORDS // groups)
        for first in range(0, rows, block):
            part = slice(first, first + block)
            _widen(words[part], stored["step"][part], stored["offset"][part], quarters[part])

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        return self._slot.decode(slot, out, in_, dtype)


def _row_scale(scale: Tensor, offset: Tensor) -> Tensor:
    """The smallest scale (N, 1) with every level offset + scale * 0..3 of a row within -128..127 of it."""
    largest = (offset + LARGEST * scale).amax(dim=1, keepdim=True)
    smallest = offset.amin(dim=1, keepdim=True)
    return torch.maximum(smallest / -128, largest / 127).clamp_(min=0)


def _pack(codes: Tensor) -> Tensor:
    """Codes uint8 (N, G, 16) as bytes (N, 4 G)."""
    rows, groups, _ = codes.shape
    quarters = codes.view(rows, groups, 4, 4).unbind(2)
    packed = torch.zeros_like(quarters[0])
    for index, quarter in enumerate(quarters):
        packed |= quarter << (2 * index)
    return packed.view(rows, 4 * groups)


def _widen(words: Tensor, step: Tensor, offset: Tensor, quarters: Tensor) -> None:
    """Four weights a word, all bytes at once: step * code + offset + 128 lies within 0..255, so that nothing
    is carried from byte to byte; flipping the top bit of each byte then takes the 128 away."""
    step = step.int()
    offset = offset.int().add_(128).mul_(0x01010101)
    codes = torch.empty_like(words)
    for index in range(4):
        torch.bitwise_right_shift(words, 2 * index, out=codes)
        torch.addcmul(offset, codes.bitwise_and_(0x03030303), step, out=quarters[:, index])
    quarters.bitwise_xor_(-0x7F7F7F80)  # 0x80808080 as a signed word
