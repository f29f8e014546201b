"""2 bits within the levels of the 4-bit format: 3 bits a weight at group 64, 2 of code, half a bit of ladder (see
`ladders`), half a bit of scale and zero.

Slots hold them as they are stored. A CPU's kernels widen a block of rows where they compute with it, a GPU's each tile.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tiermoe.quant import int4_layout, ladders
from tiermoe.quant.encoding import Field, SameInSlot
from tiermoe.quant.int4 import Int4
from tiermoe.quant.quantized import Quantizer
from tiermoe.quant.rowmajor import LAYOUT as ROW_MAJOR
from tiermoe.quant.rowmajor import on_scale, pack_nibbles, unpack_nibbles
from tiermoe.quant.scratch import scratch

BLOCK_WEIGHTS = 1 << 20  # weights widened at a time: bounds the temporaries to about a byte each
_LEVELS_AT_ONCE = 1 << 18  # weights: their levels and the steps to them take 6 to 9 bytes each


@dataclass(frozen=True)
class Int2(SameInSlot):
    """Fields `codes` uint8 (N, K / 4), `ladders` uint8 (N, K / 16), and Int4's `scales_and_zeros` (K / group, N, 2).

    `codes` are the nibbles of `ladders.pair` and `ladders` the packed ladders, each in the machine's order for a matrix
    of K / 2 and K / 8 columns: their nibbles then stand as those of Int4 do."""

    layout: str
    group: int
    bits: ClassVar[int] = 2

    @property
    def name(self) -> str:
        return f"int2/{self.layout}/g{self.group}"

    @property
    def widened(self) -> Int4:
        """The encoding that `widen_codes` gives."""
        return Int4(self.layout, self.group)

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (
            Field("codes", torch.uint8, (out, in_ // 4)),
            Field("ladders", torch.uint8, (out, in_ // 16)),
            Field("scales_and_zeros", dtype, (in_ // self.group, out, 2), rows_at=1),
        )

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        scale, zero, pairs, chosen = _quantize(weight, quantizer, dtype, self.group)
        return {
            "codes": int4_layout.pack(pairs.flatten(1)),
            "ladders": int4_layout.pack(chosen),
            "scales_and_zeros": torch.stack((scale.t(), zero.t()), dim=-1).contiguous(),
        }

    def rows_apart(self, columns: int, quantizer: Quantizer) -> int | None:
        return self.widened.rows_apart(columns, quantizer)

    def widen_codes(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same weights in the fields of Int4; the codes lie in a scratch buffer that the next call uses again."""
        stored, groups = fields["codes"], len(fields["scales_and_zeros"])
        widened = scratch.take("widened", (len(stored), 2 * stored.shape[1]), torch.uint8)
        for section in int4_layout.sections(len(stored)):
            part = slice(section.first, section.first + section.blocks * section.rows)
            count = section.blocks * groups
            codes = stored[part].view(count, 4, -1)
            chosen = fields["ladders"][part].view(count, 1, -1)
            target = widened[part].view(count, 8, -1)
            block = max(1, BLOCK_WEIGHTS // (self.group * section.rows))
            for first in range(0, count, block):
                some = slice(first, first + block)
                ladders.widen(codes[some], chosen[some], target[some])
        return {"codes": widened, "scales_and_zeros": fields["scales_and_zeros"]}

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        return self.widened.decode(self.widen_codes(slot), out, in_, dtype)


@dataclass(frozen=True)
class RowMajorInt2(SameInSlot):
    """Fields `codes` uint8 (4, N, K / 16), `ladders` uint8 (N, K / 16), `scale` and `zero` (N, K / group) as
    RowMajorInt4's; the very weights of Int2.

    Byte j of `codes[i, n]` holds nibbles 2 j (low) and 2 j + 1 of the row's (g, i, q), g before q (see
    `ladders.pair`); byte j of a row of `ladders` those of (g, q): the four eighths of a row stand apart, so that each
    is one run beside the ladders."""

    group: int
    bits: ClassVar[int] = 2

    @property
    def name(self) -> str:
        return f"int2/{ROW_MAJOR}/g{self.group}"

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        groups = in_ // self.group
        return (
            Field("codes", torch.uint8, (4, out, in_ // 16), rows_at=1),
            Field("ladders", torch.uint8, (out, in_ // 16)),
            Field("scale", dtype, (out, groups)),
            Field("zero", dtype, (out, groups)),
        )

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        scale, zero, pairs, chosen = _quantize(weight, quantizer, dtype, self.group)
        codes = pack_nibbles(pairs.movedim(2, 0).flatten(2)).contiguous()
        return {"codes": codes, "ladders": pack_nibbles(chosen), "scale": scale, "zero": zero}

    def rows_apart(self, columns: int, quantizer: Quantizer) -> int | None:
        return quantizer.rows_apart(columns)

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        result = torch.empty(out, in_, dtype=dtype, device=slot["scale"].device)
        for first in range(0, out, block := max(1, _LEVELS_AT_ONCE // in_)):
            part = slice(first, first + block)
            values = on_scale(self._levels(slot, part), slot["scale"][part], slot["zero"][part], dtype)
            result[part] = values.view(-1, in_)
        return result

    def _levels(self, slot: Mapping[str, Tensor], rows: slice) -> Tensor:
        """Of the 16 levels of 4 bits those of the weights, uint8 (rows, groups, group)."""
        groups, width = slot["scale"].shape[1], self.group // ladders.STRIPE
        pairs = unpack_nibbles(slot["codes"][:, rows]).view(4, -1, groups, width)
        chosen = unpack_nibbles(slot["ladders"][rows]).view(-1, groups, width)
        codes = torch.cat((pairs & 3, pairs >> 2)).movedim(0, 2)
        low, place = (each[:, :, None] for each in (chosen & 3, chosen >> 2))
        return (codes * (low + ladders.LEAST_STEP) + (3 - low) * place).flatten(2)


def _quantize(
    weight: Tensor, quantizer: Quantizer, dtype: torch.dtype, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scales and zeros (N, G) in `dtype`, pairs (N, G, 4, group / 8) and packed ladders (N, K / 8)."""
    grid = quantizer.grid(weight, group)
    scale, zero = grid.scale.to(dtype), grid.zero.to(dtype)
    # for the scales and zeros as stored, so that their rounding to `dtype` costs next to nothing
    codes, chosen = ladders.choose(weight, scale, zero, grid.ladders)
    return scale, zero, ladders.pair(codes, scale.shape[1]), chosen
