"""The order in which torch's CPU int4 operator keeps its codes.

``aten::_convert_weight_to_int4pack_for_cpu`` packs blocks of rows: within a block, the column is the outer
index and two rows share a byte. How many rows make a block, and which two share a byte, depends on the vector
width of the kernels that torch picked for this machine. Both are found by packing known patterns.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tiermoe.quant.scratch import scratch

ROWS = 16  # the operator takes multiples of it
PIECE_ROWS = 256  # a multiple of any block's rows


@dataclass(frozen=True)
class Section:
    """Blocks of equal size. `split`: byte j of a column holds rows j and rows/2 + j, else 2j and 2j + 1."""

    first: int
    blocks: int
    rows: int
    split: bool


def cpu_layout() -> str:
    """The name of this machine's order of int4 codes; a store packed for another one cannot be used here."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    return f"cpu-{capability}" if capability in ("avx512", "avx2") else "cpu-default"


def pack(codes: Tensor) -> Tensor:
    """Codes 0..15 (N, K), any integer dtype, in the operator's order: uint8 (N, K / 2)."""
    operator = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    # in pieces that hold whole blocks: the operator wants 32 bits a code
    return torch.cat([operator(part.int().contiguous(), 1) for part in torch.split(codes, PIECE_ROWS)])


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
    block = block_rows()
    full, rest = divmod(rows, block)
    found = []
    if full:
        found.append(Section(0, full, block, _is_split(block)))
    if rest:
        found.append(Section(full * block, 1, rest, _is_split(rest)))
    return tuple(found)


@lru_cache(maxsize=1)
def block_rows() -> int:
    """Rows of a full block, found by packing: the second of two columns begins where the first one ends."""
    columns = torch.arange(2, dtype=torch.int32).expand(PIECE_ROWS, 2)
    return int(pack(columns).flatten().argmax()) * 2


@lru_cache
def _is_split(rows: int) -> bool:
    """Whether bytes of a block of `rows` hold rows j and rows/2 + j.

    Raises NotImplementedError for an order that is neither of the two."""
    index = torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, 2)
    low, high = (pack(digit).flatten()[: rows // 2].int() for digit in (index & 15, index >> 4))
    order = torch.stack(((low & 15) + 16 * (high & 15), (low >> 4) + 16 * (high >> 4)))
    if torch.equal(order, torch.arange(rows).view(2, -1)):
        return True
    if torch.equal(order, torch.arange(rows).view(-1, 2).t()):
        return False
    raise NotImplementedError(f"this torch packs int4 codes of {rows} rows in an unknown order")
