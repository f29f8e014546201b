"""The order in which 4-bit codes are stored for CPUs: one for all of them.

Blocks of 64 rows; within a block the column is the outer index, and two rows share a byte: rows j and 32 + j of a full
block, rows 2 j and 2 j + 1 of the last one where it has fewer than 64. It is the order that torch's operator
``_weight_int4pack_mm_for_cpu`` takes where torch runs on AVX-512, hence its name; our own kernels take it on every
processor, and so does decoding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.quant.scratch import scratch

ROWS = 16  # a matrix has a multiple of them
BLOCK_ROWS = 64
NAME = "cpu-avx512"


@dataclass(frozen=True)
class Section:
    """Blocks of equal size. `split`: byte j of a column holds rows j and rows/2 + j, else 2j and 2j + 1."""

    first: int
    blocks: int
    rows: int
    split: bool


def cpu_layout() -> str:
    """The name of the order of int4 codes that CPUs take; a store packed in another one cannot be used here."""
    return NAME


def is_torchs() -> bool:
    """Whether torch's operator takes this order on this machine: it has an order of its own for each vector width."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def pack(codes: Tensor) -> Tensor:
    """Codes 0..15 (N, K), any integer dtype, N a multiple of 16, in this order: uint8 (N, K / 2)."""
    rows, columns = codes.shape
    packed = torch.empty((rows, columns // 2), dtype=torch.uint8)
    for section in sections(rows):
        end = section.first + section.blocks * section.rows
        half = section.rows // 2
        source = codes[section.first : end].to(torch.uint8).view(section.blocks, section.rows, columns)
        low, high = (source[:, :half], source[:, half:]) if section.split else (source[:, ::2], source[:, 1::2])
        packed[section.first : end].view(section.blocks, columns, half).copy_((low | high << 4).transpose(1, 2))
    return packed


def unpack_transposed(packed: Tensor, first: int, last: int) -> Tensor:
    """The codes of the columns first..last - 1 of packed ones (N, K / 2): uint8 (last - first, N), in a scratch buffer
    that the next call uses again."""
    rows, columns = packed.shape[0], packed.shape[1] * 2
    codes = scratch.take("codes", (last - first, rows), torch.uint8)
    for section in sections(rows):
        end = section.first + section.blocks * section.rows
        half = section.rows // 2
        source = packed[section.first : end].view(section.blocks, columns, half)[:, first:last]
        pairs, low, high = (scratch.take(name, tuple(source.shape), torch.uint8) for name in ("pairs", "low", "high"))
        pairs.copy_(source)
        torch.bitwise_and(pairs, 15, out=low)
        torch.bitwise_right_shift(pairs, 4, out=high)
        target = codes[:, section.first : end]
        if section.split:  # runs of `half` rows, a multiple of 8: moved as words
            words = target.view(torch.int64).view(last - first, section.blocks, 2, half // 8)
            words[:, :, 0].copy_(low.view(torch.int64).transpose(0, 1))
            words[:, :, 1].copy_(high.view(torch.int64).transpose(0, 1))
        else:
            nibbles = target.view(last - first, section.blocks, half, 2)
            nibbles[..., 0].copy_(low.transpose(0, 1))
            nibbles[..., 1].copy_(high.transpose(0, 1))
    return codes


def sections(rows: int) -> tuple[Section, ...]:
    """Full blocks, then the rest of the rows as one block."""
    full, rest = divmod(rows, BLOCK_ROWS)
    found = [Section(0, full, BLOCK_ROWS, True)] if full else []
    return (*found, Section(full * BLOCK_ROWS, 1, rest, False)) if rest else tuple(found)
