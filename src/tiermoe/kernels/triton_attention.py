# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
# ruff: noqa: RUF005
# (as in triton_kernels.py)
"""Attention of one token on GPUs over its sequence's slab of the KV cache (flash-decoding: Dao et al., 2023). Position
and slab are read from the device's memory, so that a CUDA graph of the launches serves every position.

Positions are cut into splits at multiples of `SPLIT`. A program of the first kernel takes a split for up to 16 heads
that share keys: scores and softmax in fp32, about the split's own maximum. The second kernel adds a head's splits. The
grid follows from the room of a slab; programs of splits without positions that the token attends to end at once, and
the second kernel does not read them.

The order of summation follows from the shape of a row and the token's position alone, not from room or slab: no
argument that depends on them is specialized, so that one compilation serves all. Block sizes are a fixed function of
the shape, as in triton_kernels.py; they have not been tuned on hardware. fp32 is multiplied as fp32, never as TF32;
exponentials are rounded to the type of the values before they are multiplied by them.

Needs Triton: `gpu` imports this module on first use.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiermoe.kernels.triton_kernels import ALIGNMENT, FUSE, aligned

SPLIT = 256  # positions of a program
_HEADS = 16  # of queries in a program, the least height of a tensor-core tile
_TILE = 64  # columns of a product of queries and keys
_SPLITS, _COLUMNS = 16, 128  # splits and columns of values that a program of the combination takes at a time


@triton.jit
def write_row_kernel(
    keys, values, new_keys, new_values, place, room,
    key_slab, key_head, key_row, value_slab, value_head, value_row,
    KEY_COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A head's key, and its value unless `values` is None."""
    head, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    row, slab = tl.load(place) % room, tl.load(place + 1)
    inside = column < KEY_COLUMNS
    key = tl.load(new_keys + head * KEY_COLUMNS + column, mask=inside)
    tl.store(keys + slab * key_slab + head * key_head + row * key_row + column, key, mask=inside)
    if values is not None:
        inside = column < VALUE_COLUMNS
        value = tl.load(new_values + head * VALUE_COLUMNS + column, mask=inside)
        tl.store(values + slab * value_slab + head * value_head + row * value_row + column, value, mask=inside)


@triton.jit
def _attended(place, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first position that the token attends to, and the last, its own."""
    last = tl.load(place).to(tl.int32)
    first = last * 0
    if CHUNKED:
        first = last // WINDOW * WINDOW
    elif WINDOW is not None:
        first = tl.maximum(last - WINDOW + 1, 0)
    return first, last


@triton.jit(do_not_specialize=["room", "splits", "key_slab", "key_head", "value_slab", "value_head"])
def split_kernel(
    query, keys, values, place, weighed, maxima, totals, scale, room, splits,
    key_slab, key_head, value_slab, value_head, KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr,
    KEYS_ALIGNED: tl.constexpr, VALUES_ALIGNED: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """A split's maximum, its sum of exp(score - maximum) and of the values by them, for some heads of a kv head."""
    kv_head, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, last = _attended(place, WINDOW, CHUNKED)
    start = (first // SPLIT + split) * SPLIT
    if start > last:
        return
    begin, end = tl.maximum(start, first) // POSITIONS * POSITIONS, tl.minimum(start + SPLIT, last + 1)
    slab = tl.load(place + 1)
    keys = tl.multiple_of(keys + slab * key_slab + kv_head * key_head, KEYS_ALIGNED)
    values = tl.multiple_of(values + slab * value_slab + kv_head * value_head, VALUES_ALIGNED)
    own = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    head, of_group = kv_head * GROUP + own, own < GROUP
    in_tile = tl.arange(0, TILE)
    queries, sums = (), ()
    for tile in tl.static_range(0, COLUMNS, TILE):
        of_tile = of_group[:, None] & (tile + in_tile < COLUMNS)[None, :]
        at = query + head[:, None] * COLUMNS + (tile + in_tile)[None, :]
        queries = queries + (tl.load(at, mask=of_tile, other=0),)
    for _tile in tl.static_range(0, VALUE_COLUMNS, TILE):
        sums = sums + (tl.zeros((HEADS, TILE), dtype=tl.float32),)
    maximum = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), dtype=tl.float32)
    for block in range(begin, end, POSITIONS):
        position = block + tl.arange(0, POSITIONS)
        row, attended = (position % room).to(tl.int64), (position >= first) & (position < end)
        scores = tl.zeros((HEADS, POSITIONS), dtype=tl.float32)
        for tile in tl.static_range(0, COLUMNS, TILE):
            there = (tile + in_tile < COLUMNS)[:, None] & attended[None, :]
            key = tl.load(keys + (tile + in_tile)[:, None] + (row * KEY_ROW)[None, :], mask=there, other=0)
            scores = tl.dot(queries[tile // TILE], key, scores, input_precision="ieee")
        scores = tl.where(attended[None, :], scores * scale, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        shrunk, weights = tl.exp(maximum - higher), tl.exp(scores - higher[:, None])
        total = total * shrunk + tl.sum(weights, axis=1)
        added = ()
        for tile in tl.static_range(0, VALUE_COLUMNS, TILE):
            in_values = attended[:, None] & (tile + in_tile < VALUE_COLUMNS)[None, :]
            value = tl.load(values + (row * VALUE_ROW)[:, None] + (tile + in_tile)[None, :], mask=in_values, other=0)
            part = sums[tile // TILE] * shrunk[:, None]
            added = added + (tl.dot(weights.to(value.dtype), value, part, input_precision="ieee"),)
        sums = added
        maximum = higher
    place_of_head = head * splits + split
    tl.store(maxima + place_of_head, maximum, mask=of_group)
    tl.store(totals + place_of_head, total, mask=of_group)
    for tile in tl.static_range(0, VALUE_COLUMNS, TILE):
        of_tile = of_group[:, None] & (tile + in_tile < VALUE_COLUMNS)[None, :]
        at = weighed + place_of_head[:, None] * VALUE_COLUMNS + (tile + in_tile)[None, :]
        tl.store(at, sums[tile // TILE], mask=of_tile)


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    weighed, maxima, totals, place, sinks, y, splits,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, VALUE_COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
    SPLITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some columns of a head's values, of all its splits. A sink counts as a score, and adds nothing to the values."""
    head, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    first, last = _attended(place, WINDOW, CHUNKED)
    count = last // SPLIT - first // SPLIT + 1
    highest = tl.full((SPLITS,), float("-inf"), tl.float32)
    for at in range(0, count, SPLITS):
        split = at + tl.arange(0, SPLITS)
        own = tl.load(maxima + head * splits + split, mask=split < count, other=float("-inf"))
        highest = tl.maximum(highest, own)
    maximum = tl.max(highest)
    total = tl.zeros((SPLITS,), dtype=tl.float32)
    sums = tl.zeros((SPLITS, WIDTH), dtype=tl.float32)
    for at in range(0, count, SPLITS):
        split = at + tl.arange(0, SPLITS)
        there, place_of_head = split < count, head * splits + split
        shrunk = tl.exp(tl.load(maxima + place_of_head, mask=there, other=float("-inf")) - maximum)
        total += shrunk * tl.load(totals + place_of_head, mask=there, other=0)
        mask = there[:, None] & (column < VALUE_COLUMNS)[None, :]
        of_splits = weighed + place_of_head[:, None] * VALUE_COLUMNS + column[None, :]
        sums += shrunk[:, None] * tl.load(of_splits, mask=mask, other=0)
    divisor = tl.sum(total)
    if sinks is not None:
        divisor += tl.exp(tl.load(sinks + head) - maximum)  # infinite where all weights are below 2^-126: they become 0
    attended = tl.sum(sums, axis=0) / divisor
    tl.store(y + head * VALUE_COLUMNS + column, attended.to(y.dtype.element_ty), mask=column < VALUE_COLUMNS)


def constants_of(
    group: int, columns: int, value_columns: int, itemsize: int, window: int | None, chunked: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The constants of the two kernels of `attend_row`, from the shape of a row of so many bytes a number alone."""
    shared = {
        "WINDOW": window, "CHUNKED": chunked and window is not None, "VALUE_COLUMNS": value_columns, "SPLIT": SPLIT,
        "enable_fp_fusion": FUSE,
    }  # fmt: skip
    width, row_bytes = max(16, triton.next_power_of_2(value_columns)), (columns + value_columns) * itemsize
    split = {
        **shared, "GROUP": group, "COLUMNS": columns, "HEADS": _HEADS, "TILE": _TILE,
        "POSITIONS": 32 if row_bytes <= 1024 else 16, "num_warps": 4, "num_stages": 3 if row_bytes <= 2304 else 1,
    }  # fmt: skip
    return split, {**shared, "SPLITS": _SPLITS, "WIDTH": min(width, _COLUMNS), "num_warps": 4}


def write_row(kept: Sequence[Tensor], new: Sequence[Tensor], place: Tensor) -> None:
    """Writes a token's keys and values, or its keys alone, to their row of the KV cache. One launch.

    kept: (slabs, heads, room, columns) each, of equal heads and room, a row's columns contiguous; new: (heads, columns)
    each. place int64 (2): the token's position, which lies at row position % room, and its slab; read when the launch
    runs."""
    (keys, *values), (new_keys, *new_values) = kept, [each.contiguous() for each in new]
    _, heads, room, _ = keys.shape
    value = values[0] if values else None
    value_columns, value_strides = (0, (0, 0, 0)) if value is None else (value.shape[3], value.stride()[:3])
    widest = max(keys.shape[3], value_columns)
    with torch.cuda.device(keys.get_device()):  # Triton launches on the current device, which may be another
        write_row_kernel[(heads,)](
            keys, value, new_keys, new_values[0] if new_values else None, place, room,
            *keys.stride()[:3], *value_strides,
            KEY_COLUMNS=keys.shape[3], VALUE_COLUMNS=value_columns, WIDTH=triton.next_power_of_2(widest),
        )  # fmt: skip


def attend_row(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    place: Tensor,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """A token's attention to its sequence's positions, its own the last → (heads, value columns) in query's dtype. Two
    launches.

    query (heads, columns) over keys (slabs, kv heads, room, columns) and values (slabs, kv heads, room, value columns),
    all of one dtype, a row's columns contiguous; values may be columns of the keys. place int64 (2): the token's
    position and its slab, read when the launches run; position p lies at row p % room. window: the last positions that
    it attends to, of which a room has at least as many; None: all. chunked: from a multiple of the window on (Llama 4).
    sinks: float32 (heads), logits that join the softmax and have no value."""
    query, (heads, columns), (_, kv_heads, room, value_columns) = aligned(query), query.shape, values.shape
    group, of_window = heads // kv_heads, room if window is None else min(window, room)
    splits = triton.cdiv(of_window - 1, SPLIT) + 1  # that so many positions can touch
    of_split, of_combine = constants_of(group, columns, value_columns, keys.itemsize, window, chunked)
    scratch: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    weighed = torch.empty((heads, splits, value_columns), **scratch)
    maxima, totals = torch.empty((heads, splits), **scratch), torch.empty((heads, splits), **scratch)
    y = query.new_empty((heads, value_columns))
    with torch.cuda.device(query.get_device()):  # Triton launches on the current device, which may be another
        split_kernel[(triton.cdiv(group, _HEADS), kv_heads, splits)](
            query, keys, values, place, weighed, maxima, totals, scale, room, splits,
            *keys.stride()[:2], *values.stride()[:2], KEY_ROW=keys.stride(2), VALUE_ROW=values.stride(2),
            KEYS_ALIGNED=_alignment(keys), VALUES_ALIGNED=_alignment(values), **of_split,
        )  # fmt: skip
        combine_kernel[(heads, triton.cdiv(value_columns, of_combine["WIDTH"]))](
            weighed, maxima, totals, place, sinks, y, splits, **of_combine
        )
    return y


def _alignment(kept: Tensor) -> int:
    """Bytes of which every row's address is a multiple, `ALIGNMENT` at the most."""
    return math.gcd(ALIGNMENT, kept.data_ptr(), *(stride * kept.itemsize for stride in kept.stride()[:3]))
