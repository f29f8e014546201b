"""Attention of a prompt's tokens over their sequence, blocks of queries by tiles of positions: no scores of all tokens
are held, and a key/value cache at 8 bits is read as it is.

A token's values depend on its query and on its sequence's positions alone, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe import native
from tiermoe.kernels.native.attention import HEAD_COLUMNS, LARGEST_HEAD, address, plain
from tiermoe.kernels.native.few_tokens_attention import Slabs
from tiermoe.native import _native
from tiermoe.quant.scratch import scratch

_ROWS, _TILE = 64, 128  # queries of a block, positions of a tile


def takes_prompts(dtype: torch.dtype, key_columns: int, value_columns: int) -> bool:
    """Whether the kernel runs here, for heads of so many columns."""
    fits = all(0 < columns <= LARGEST_HEAD and columns % HEAD_COLUMNS == 0 for columns in (key_columns, value_columns))
    return fits and dtype == torch.bfloat16 and native.available()


def prompt_workspace(threads: int, key_columns: int, value_columns: int) -> int:
    """Bytes that the kernel takes beside queries, keys, values and what it returns."""
    return 4 * threads * ((_ROWS + _TILE) * (key_columns + value_columns) + (2 * _TILE + 5) * _ROWS)


def prompt_state(tokens: int, heads: int, kv_heads: int, value_columns: int) -> int:
    """Bytes of a `Piece`'s state."""
    return 4 * kv_heads * -(-(tokens * heads // kv_heads) // _ROWS) * _ROWS * (value_columns + 2)


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions begin .. end - 1 of a sequence whose keys and values are not all there at once: they lie from row 0 of
    the slab on, whose room divides `begin`, as a tile of 128 positions does. state: a buffer of `prompt_state` bytes,
    the same for all pieces, which follow each other from position 0 on."""

    begin: int
    end: int
    state: Tensor


def prompt_attention(
    query: Tensor,
    slabs: Slabs,
    slab: int,
    first: int,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    piece: Piece | None = None,
) -> Tensor:
    """query (T, heads, columns), bfloat16: the tokens of a sequence from position `first` on, in position. Their keys
    and values, and those before, are in slab `slab`. window: positions that each attends to, its own included; None:
    all. sinks (heads): scores without a value that join each softmax. piece: the positions that are attended to; None:
    all → (T, heads, value columns); only the last piece's have a meaning.

    ValueError: of another dtype or shape; slabs that do not fit. The interpreter's lock is released meanwhile."""
    tokens, heads, columns = query.shape
    query = query.contiguous()
    if not plain(query) or columns != slabs.keys.shape[3] or slabs.values is None:
        raise ValueError(f"queries must be bfloat16 (T, heads, {slabs.keys.shape[3]}), not {tuple(query.shape)}")
    if sinks is not None and (not plain(sinks) or sinks.numel() != heads):
        raise ValueError(f"sinks must be contiguous bfloat16 ({heads})")
    out = torch.empty((tokens, heads, slabs.values.shape[3]), dtype=torch.bfloat16)
    if piece is not None and piece.state.nbytes < _native.prompt_state(slabs.packed, tokens, heads):
        raise ValueError(f"a state of {piece.state.nbytes} bytes is too small")
    begin, end, state = (0, first + tokens, 0) if piece is None else (piece.begin, piece.end, piece.state.data_ptr())
    threads = torch.get_num_threads()
    workspace = scratch.address("attention", _native.prompt_workspace(slabs.packed, threads))
    _native.attend_prompt(
        slabs.packed, query.data_ptr(), out.data_ptr(), address(sinks), tokens, heads, slab, first, window or 0, scale,
        begin, end, state, workspace, threads,
    )  # fmt: skip
    return out
