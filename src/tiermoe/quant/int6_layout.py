"""The order in which 6-bit codes are stored: the low four bits as 4-bit codes are, the high two in a plane beside them.

Blocks of 64 rows; within a block four columns after each other fill 192 bytes, one run for whoever reads a block. First
come the low bits, 32 bytes a column, byte j rows j (low nibble) and 32 + j (high nibble): the order of 4-bit codes.
Then the high bits, 32 bytes for columns 0 and 1 and 32 for columns 2 and 3. From its lowest bits up, byte j holds those
of row 32 + j and of row j in the first column, then of row 32 + j and of row j in the second.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ROWS = 64  # a matrix has a multiple of them
COLUMNS = 4  # likewise
_HALF = BLOCK_ROWS // 2
_LOW = COLUMNS * _HALF  # bytes
_RUN = _LOW + COLUMNS * BLOCK_ROWS // 4  # bytes of four columns of a block
_PLACES = ((0, 0, 2), (0, 1, 0), (1, 0, 6), (1, 1, 4))  # column of a pair, half of the rows, where its two bits begin


def pack(codes: Tensor) -> Tensor:
    """Codes 0..63, uint8 (N, K), in this order: uint8 (N, 3 K / 4)."""
    rows, columns = codes.shape
    packed = torch.empty((rows, columns * 3 // 4), dtype=torch.uint8)
    low, high = _planes(packed)
    low.zero_()
    high.zero_()
    # (block, four columns, pair of them, column of it, half of the rows, row of it)
    source = codes.view(-1, 2, _HALF, columns // COLUMNS, 2, 2).permute(0, 3, 4, 5, 1, 2)
    for column, half, at in _PLACES:
        some = source[:, :, :, column, half]
        low[:, :, :, column] |= (some & 15) << 4 * half
        high |= some >> 4 << at
    return packed


def unpack_transposed(packed: Tensor, codes: Tensor) -> Tensor:
    """The codes of whole blocks of rows, packed (N, 3 K / 4), written into uint8 (K, N); returns that."""
    low, high = _planes(packed)
    # as in `pack`, but for the order of the dimensions
    target = codes.view(low.shape[1], 2, 2, low.shape[0], 2, _HALF)
    for column, half, at in _PLACES:
        bits = (high << 4 - at if at < 4 else high >> at - 4) & 0x30
        target[:, :, column, :, half].copy_((low[:, :, :, column] >> 4 * half & 15 | bits).permute(1, 2, 0, 3))
    return codes


def _planes(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the low bits (block, four columns, pair of them, column of it, 32) and of the high ones (block, four
    columns, pair of them, 32)."""
    runs = packed.view(len(packed) // BLOCK_ROWS, -1, _RUN)
    low, high = runs[..., :_LOW], runs[..., _LOW:]
    return low.view(*low.shape[:2], 2, 2, _HALF), high.view(*high.shape[:2], 2, _HALF)
