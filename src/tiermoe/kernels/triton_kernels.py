# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
# ruff: noqa: RUF005
# (Triton's kernel language has no types that a checker knows, and tuples grow by +; what is called from outside is
# annotated.)
"""Linear layers on packed weights for GPUs: y = x @ W.T, W in 2 to 8 bits, decoded inside the kernel. The codes lie as
the CPUs' kernels take them, so that a store, a slot in main memory and a slot on the GPU have the same bytes.

A program takes a block of 64 rows (`triton_codes`). Levels are summed within a group of columns, then scaled once:
scale * sum(x * level) + zero * sum(x). At 8 bits a row has one scale.

One token goes through a matrix-vector kernel: a program owns a block of rows, a thread half the rows of a few columns
at a time, and the partial sums of its threads are added up once at the end. More tokens go through a tiled kernel: a
tile of levels, exact in the type of x, is multiplied on tensor cores and accumulated in fp32; fp32 inputs are
multiplied as fp32, never as TF32.

The order of summation follows from (M, N, K), the types and the coding alone: K is split over the threads of a program
and not between programs, there are no atomics, and block sizes are a fixed function of the shape. Autotuning is left
out on purpose: it picks block sizes by timing, so that two runs could add in two orders and differ in the last bit.
What is fixed is the order on one GPU model under one version of Triton; another compiler may choose another. The block
sizes follow from reasoning about loads per program; they have not been tuned on hardware.

Several experts in one launch (`grouped_linear`): an expert is found by the address of its slot, in which the matrix's
fields lie at the same offsets for every expert. A program computes one block of one tile of an expert's tokens as the
kernels for one expert do: same blocks, same sums, and the alignment that a pointer argument would have shown the
compiler is told to it. The number of tiles is in the grid alone, so that one compilation, hence one order of summation,
serves any number.

Needs Triton: `gpu` imports this module on first use.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiermoe.formats.encoding import BLOCK_ROWS
from tiermoe.formats.expert_format import SlotMatrix
from tiermoe.formats.int4 import sections
from tiermoe.kernels.triton_codes import (
    UNITS,
    int8_levels,
    join_all,
    level_of,
    levels_of,
    load_scales,
    load_units,
    row_of,
    unit_levels,
)

# Bytes; below it Triton compiles another kernel, which may add in another order. Slot fields have more.
ALIGNMENT = 16
FUSE = True  # a * b + c rounds once: part of the result, so not left to Triton's default, which 3.10 changes


@triton.jit
def block_sums(
    x, codes, scales, levels, block, N, K,
    CODING: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr, HEAD: tl.constexpr,
    LANES: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """W[rows of a block] @ x for x (K), as fp32 (WORDS * LANES) in the order of `row_of`. WIDTH: pairs of
    threads, each of which takes a few columns of one group."""
    takes: tl.constexpr = 4 if COLUMNS == 4 else 8  # columns: more would take the registers of a second program
    each: tl.constexpr = takes // COLUMNS
    apart: tl.constexpr = GROUP // takes  # units from one of a thread's to the next: neighbours load neighbours
    of_block: tl.constexpr = GROUP // COLUMNS * PLANES * 32 + HEAD  # bytes of a group in a whole block
    run: tl.constexpr = GROUP // COLUMNS * PLANES * (ROWS // 2) + HEAD  # bytes of a group in this one
    unit = tl.arange(0, WIDTH)
    start = tl.multiple_of((codes + block * (K // GROUP) * of_block + HEAD).to(tl.pointer_type(tl.int32)), 16)
    row_of_word = tl.arange(0, WORDS)[None, :]
    totals = ()
    for _lane in tl.static_range(LANES):
        totals = totals + (tl.zeros((WIDTH, WORDS), dtype=tl.float32),)
    for first in range(0, K // GROUP, WIDTH // apart):
        group = first + unit // apart
        inside = group < K // GROUP
        units = ()  # all loads before the first is used
        for i in tl.static_range(each):
            at = start + (group * (run // 4) + (i * apart + unit % apart) * (PLANES * (ROWS // 8)))
            units = units + (load_units(at, inside, CODING, PLANES, LANES, ROWS, WORDS),)
        parts = ()
        for _lane in tl.static_range(LANES):
            parts = parts + (tl.zeros((WIDTH, WORDS), dtype=tl.float32),)
        sum_x = tl.zeros((WIDTH,), dtype=tl.float32)
        for i in tl.static_range(each):
            for column in tl.static_range(COLUMNS):
                k = group * GROUP + (i * apart + unit % apart) * COLUMNS + column
                value = tl.load(x + k, mask=inside, other=0).to(tl.float32)
                sum_x += value
                added = ()
                for lane in tl.static_range(LANES):
                    added = added + (parts[lane] + value[:, None] * level_of(units[i], levels, CODING, column, lane),)
                parts = added
        added = ()
        for lane in tl.static_range(LANES):
            row = row_of(row_of_word, lane, CODING, ROWS)
            mask = inside[:, None]
            if WORDS * LANES != ROWS:
                mask = mask & (row < ROWS)
            scale, zero = load_scales(codes, scales, block, group[:, None], row, mask, N, K, CODING, GROUP, run)
            total = totals[lane] + scale * parts[lane]
            if CODING == "INT4" or CODING == "INT2":
                total += zero * sum_x[:, None]
            added = added + (total,)
        totals = added
    return tl.sum(tl.reshape(join_all(totals, LANES), (WIDTH, WORDS * LANES)), axis=0)


@triton.jit
def int8_sums(x, codes, scales, rows, N, K, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """W[rows] @ x for x (K), as fp32 (ROWS): one partial sum per column of a tile, added up once at the end."""
    partial = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for k0 in range(0, K, WIDTH):
        k = k0 + tl.arange(0, WIDTH)
        values = tl.load(x + k, mask=k < K, other=0).to(tl.float32)
        partial += int8_levels(codes, rows, k, N, K) * values[None, :]
    return tl.sum(partial, axis=1) * tl.load(scales + rows, mask=rows < N, other=0).to(tl.float32)


@triton.jit
def product(
    x, codes, scales, levels, block, N, K,
    CODING: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr, HEAD: tl.constexpr,
    LANES: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The rows of a block, and W[rows] @ x for x (K) as fp32."""
    if CODING == "INT8":
        rows = block * ROWS + tl.arange(0, ROWS)
        total = int8_sums(x, codes, scales, rows, N, K, ROWS, WIDTH)
    else:
        place = tl.arange(0, WORDS * LANES)
        rows = block * 64 + row_of(place // LANES, place % LANES, CODING, ROWS)
        total = block_sums(
            x, codes, scales, levels, block, N, K, CODING, GROUP, COLUMNS, PLANES, HEAD, LANES, ROWS, WORDS, WIDTH
        )
    return rows, total


@triton.jit
def vector_kernel(
    x, codes, scales, levels, y, first, N, K,
    CODING: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr, HEAD: tl.constexpr,
    LANES: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block = (first + tl.program_id(0)).to(tl.int64)
    rows, total = product(
        x, codes, scales, levels, block, N, K, CODING, GROUP, COLUMNS, PLANES, HEAD, LANES, ROWS, WORDS, WIDTH
    )
    tl.store(y + rows, total.to(y.dtype.element_ty), mask=rows < N)


@triton.jit
def _block_tiles(
    x, codes, scales, levels, block, tokens, M, N, K,
    CODING: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr, HEAD: tl.constexpr,
    LANES: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """x[tokens] @ W[rows of a block].T as fp32 (TOKENS, WORDS * LANES)."""
    step: tl.constexpr = min(GROUP, 64)  # columns of a tile
    of_block: tl.constexpr = GROUP // COLUMNS * PLANES * 32 + HEAD
    run: tl.constexpr = GROUP // COLUMNS * PLANES * (ROWS // 2) + HEAD
    start = tl.multiple_of((codes + block * (K // GROUP) * of_block + HEAD).to(tl.pointer_type(tl.int32)), 16)
    place, unit, k = tl.arange(0, WORDS * LANES), tl.arange(0, step // COLUMNS), tl.arange(0, step)
    row = row_of(place // LANES, place % LANES, CODING, ROWS)
    of_tokens = x + tokens[:, None] * K + k[None, :]
    total = tl.zeros((TOKENS, WORDS * LANES), dtype=tl.float32)
    for tile in range(K // step):
        group, first = tile // (GROUP // step), tile % (GROUP // step) * (step // COLUMNS)
        values = tl.load(of_tokens + tile * step, mask=(tokens < M)[:, None], other=0)
        at = start + (group * (run // 4) + (first + unit) * (PLANES * (ROWS // 8)))
        words = load_units(at, unit >= 0, CODING, PLANES, LANES, ROWS, WORDS)
        levels_of_tile = unit_levels(words, levels, CODING, COLUMNS, LANES, step // COLUMNS, WORDS)
        part = tl.dot(values, levels_of_tile.to(values.dtype), input_precision="ieee")
        scale, zero = load_scales(codes, scales, block, group, row, row < ROWS, N, K, CODING, GROUP, run)
        total += part * scale[None, :]
        if CODING == "INT4" or CODING == "INT2":
            total += tl.sum(values.to(tl.float32), axis=1)[:, None] * zero[None, :]
    return total


@triton.jit
def tiled_product(
    x, codes, scales, levels, block, tokens, M, N, K,
    CODING: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr, HEAD: tl.constexpr,
    LANES: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The rows of a block, and x[tokens] @ W[rows].T for x (M, K) as fp32 (TOKENS, rows)."""
    if CODING == "INT8":
        rows = block * ROWS + tl.arange(0, ROWS)
        total = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
        for k0 in range(0, K, WIDTH):
            k = k0 + tl.arange(0, WIDTH)
            inside = (tokens < M)[:, None] & (k < K)[None, :]
            values = tl.load(x + tokens[:, None] * K + k[None, :], mask=inside, other=0)
            w = int8_levels(codes, rows, k, N, K)
            total = tl.dot(values, tl.trans(w.to(values.dtype)), total, input_precision="ieee")
        total *= tl.load(scales + rows, mask=rows < N, other=0).to(tl.float32)[None, :]
    else:
        place = tl.arange(0, WORDS * LANES)
        rows = block * 64 + row_of(place // LANES, place % LANES, CODING, ROWS)
        total = _block_tiles(
            x, codes, scales, levels, block, tokens, M, N, K, CODING, GROUP, COLUMNS, PLANES, HEAD, LANES, ROWS, WORDS,
            TOKENS,
        )  # fmt: skip
    return rows, total


# M not specialized: one compilation, hence one order, for every number of tokens in a block
@triton.jit(do_not_specialize=["M"])
def tiled_kernel(
    x, codes, scales, levels, y, first, M, N, K,
    CODING: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr, HEAD: tl.constexpr,
    LANES: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    block = (first + tl.program_id(0)).to(tl.int64)
    tokens = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    rows, total = tiled_product(
        x, codes, scales, levels, block, tokens, M, N, K, CODING, GROUP, COLUMNS, PLANES, HEAD, LANES, ROWS, WORDS,
        WIDTH, TOKENS,
    )  # fmt: skip
    inside = (tokens < M)[:, None] & (rows < N)[None, :]
    tl.store(y + tokens[:, None] * N + rows[None, :], total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _field(slot, offset, TYPE: tl.constexpr):
    """The pointer to a field of the slot at an address; 16 is `ALIGNMENT`."""
    return tl.multiple_of((slot + offset).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def _biased(total, bias):
    """Sums, rounded to the bias's type as torch's product is before it adds the bias: in fp32."""
    return total.to(bias.dtype).to(tl.float32) + bias.to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["tiles"])
def grouped_kernel(
    x, tiles, levels, y, first, N, K, codes_at, scales_at, bias_at,
    TYPE: tl.constexpr, BIASED: tl.constexpr, SHARED: tl.constexpr, TOKENS: tl.constexpr,
    CODING: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr, HEAD: tl.constexpr,
    LANES: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A tile of `tiles_of` and a block of its expert's rows. SHARED: x is one row, of all."""
    block = (first + tl.program_id(0)).to(tl.int64)
    tile = tiles + 3 * tl.program_id(1)
    slot, token = tl.load(tile), tl.load(tile + 1)
    codes = _field(slot, codes_at, tl.int8 if CODING == "INT8" else tl.uint8)
    scales = _field(slot, scales_at, TYPE)
    y += token * N
    if not SHARED:
        x += token * K
    if TOKENS == 1:
        rows, total = product(
            x, codes, scales, levels, block, N, K, CODING, GROUP, COLUMNS, PLANES, HEAD, LANES, ROWS, WORDS, WIDTH
        )
        if BIASED:
            total = _biased(total, tl.load(_field(slot, bias_at, TYPE) + rows, mask=rows < N))
        tl.store(y + rows, total.to(y.dtype.element_ty), mask=rows < N)
    else:
        tokens, count = tl.arange(0, TOKENS).to(tl.int64), tl.load(tile + 2)
        rows, total = tiled_product(
            x, codes, scales, levels, block, tokens, count, N, K, CODING, GROUP, COLUMNS, PLANES, HEAD, LANES, ROWS,
            WORDS, WIDTH, TOKENS,
        )  # fmt: skip
        inside = (tokens < count)[:, None] & (rows < N)[None, :]
        if BIASED:
            total = _biased(total, tl.load(_field(slot, bias_at, TYPE) + rows, mask=rows < N)[None, :])
        tl.store(y + tokens[:, None] * N + rows[None, :], total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def weighted_sum_kernel(choices, y, T, H, K: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """Columns of a token's sum; choices (2, T, K) as `weighted_sums` has them. What has no address adds nothing."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.full((WIDTH,), -0.0, tl.float32)  # to which any number adds itself
    for place in tl.static_range(K):  # all loads before the first sum
        at = choices + token * K + place
        address, weight = tl.load(at), tl.load(at + T * K).to(tl.float64, bitcast=True).to(tl.float32)
        row = tl.multiple_of(address.to(tl.pointer_type(y.dtype.element_ty)), ALIGNED)
        there = column < tl.where(address != 0, H, 0)
        product = tl.load(row + column, mask=there, other=0).to(tl.float32) * weight
        added = total + product.to(y.dtype.element_ty).to(tl.float32)
        total = tl.where(there, added.to(y.dtype.element_ty).to(tl.float32), total)
    tl.store(y + token * H + column, total.to(y.dtype.element_ty), mask=column < H)


def tile_tokens(m: int) -> int:
    """Tokens that a program takes of an expert's m, or of a matrix's."""
    return 1 if m == 1 else 16 if m <= 16 else 64


def launches(coding: str, group: int, m: int, n: int, k: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(first block of rows, number of blocks, constants) of each launch for x (m, k) and W (n, k), from
    the shape alone: whole blocks, then a last one of fewer rows. ValueError where a group is no power of two.

    One token at 8 bits: few rows per program, so that 1,000 rows still occupy a large GPU, and long stretches of each
    row; below 8 bits a warp takes 128 or 64 columns of a block at a time. Up to 16 tokens share one block, the least
    height of a tensor-core tile, so that a token's result does not depend on how many of the 16 places are taken."""
    unit, longest = UNITS[coding], max(16, triton.next_power_of_2(k))
    constants = {"CODING": coding, "GROUP": group, "COLUMNS": unit.columns, "PLANES": unit.planes, "HEAD": unit.head}
    constants |= {"LANES": unit.lanes, "enable_fp_fusion": FUSE}
    if m != 1:
        constants["TOKENS"] = tile_tokens(m)
    if coding == "INT8":
        narrow = (4 if n < 4096 else 8, 512) if m == 1 else (32, 128) if m <= 16 else (64, 64)
        rows, width = narrow[0], min(narrow[1], longest)
        yield 0, triton.cdiv(n, rows), {**constants, "ROWS": rows, "WORDS": 1, "WIDTH": width}
        return
    if group & (group - 1):
        raise ValueError(f"groups of {group}: the kernels take powers of two")
    warps = 4 if m != 1 or k < 2048 else 8
    for section in sections(n):
        words = triton.next_power_of_2(section.rows // unit.lanes)
        sizes = {"ROWS": section.rows, "WORDS": words, "WIDTH": 16 * warps, "num_warps": warps}
        yield section.first // BLOCK_ROWS, section.blocks, constants | sizes


def aligned(x: Tensor) -> Tensor:
    """x, contiguous from a multiple of `ALIGNMENT` on; a copy where it does not lie so."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def linear(x: Tensor, coding: str, group: int, codes: Tensor, scales: Tensor, rows: int) -> Tensor:
    """x (M, K) @ W.T -> (M, rows) in the type of x, of W (rows, K) in a coding of `UNITS` with `group` columns to a
    scale. `codes` and `scales`: the encoding's fields, contiguous; the same one where its blocks have both. ValueError
    as `launches`."""
    m, k = x.shape
    y, x, levels = x.new_empty((m, rows)), aligned(x), levels_of(coding, x.device)
    with torch.cuda.device(x.get_device()):  # Triton launches on the current device, which may be another
        for first, blocks, constants in launches(coding, group, m, rows, k):
            if m == 1:
                vector_kernel[(blocks,)](x, codes, scales, levels, y, first, rows, k, **constants)
            else:
                grid = (blocks, triton.cdiv(m, constants["TOKENS"]))
                tiled_kernel[grid](x, codes, scales, levels, y, first, m, rows, k, **constants)
    return y


TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def tiles_of(slots: Sequence[int], counts: Sequence[int], device: torch.device) -> dict[int, Tensor]:
    """The programs of experts whose slots lie at these addresses, multiples of 16, and which take so many of
    consecutive tokens each: tokens of a tile → int64 (tiles, 3) on the device: slot, first token, number of tokens. One
    copy, which no kernel before it delays: the list is taken before the call returns."""
    tiles: dict[int, list[tuple[int, int, int]]] = {}
    begin = 0
    for slot, count in zip(slots, counts, strict=True):
        size, end = tile_tokens(count), begin + count
        tiles.setdefault(size, []).extend((slot, at, min(size, end - at)) for at in range(begin, end, size))
        begin = end
    entries = [entry for each in tiles.values() for entry in each]
    table = torch.tensor(entries, dtype=torch.int64).to(device, non_blocking=True)
    return dict(zip(tiles, torch.split(table, [len(each) for each in tiles.values()]), strict=True))


def grouped_linear(x: Tensor, tiles: Mapping[int, Tensor], matrix: SlotMatrix, shared: bool) -> Tensor:
    """y[t] = W_e @ x[t] + b_e for the expert e of each token t -> (M, N) in the type of x: the values of one call of
    `linear` for each expert with its tokens, and of a sum with its bias if it has one. One launch for each size of
    `tiles` (two where the last block has fewer rows).

    x (M, K), or (1, K) where it is `shared` by experts of one token each. The slots are read when the launches run:
    they must hold the experts until then.
    """
    n, k = matrix.rows, matrix.columns
    m = sum(map(len, tiles.values())) if shared else len(x)
    y, x, levels = x.new_empty((m, n)), aligned(x), levels_of(matrix.coding, x.device)
    with torch.cuda.device(x.get_device()):  # Triton launches on the current device, which may be another
        for size, those in tiles.items():
            for first, blocks, constants in launches(matrix.coding, matrix.group, size, n, k):
                grouped_kernel[(blocks, len(those))](
                    x,
                    those,
                    levels,
                    y,
                    first,
                    n,
                    k,
                    matrix.codes,
                    matrix.scales,
                    matrix.bias or 0,
                    TYPE=TYPES[matrix.dtype],
                    BIASED=matrix.bias is not None,
                    SHARED=shared,
                    **(constants | {"TOKENS": size}),
                )
    return y


def weighted_sums(choices: Tensor, like: Tensor) -> Tensor:
    """Each of T tokens' sum of weighted rows -> (T, H) in the type of `like` (..., H), rounded to it after each product
    and each sum, in the order given. choices (2, T, K) int64, on its device: addresses of rows (H) in that type, 0
    where there is none, and the bits of their weights in float64. One launch."""
    (_, tokens, k), columns = choices.shape, like.shape[-1]
    y = like.new_empty((tokens, columns))
    width = min(1024, triton.next_power_of_2(columns))
    step = math.gcd(columns * y.element_size(), ALIGNMENT)
    with torch.cuda.device(like.get_device()):
        # products and sums are rounded apart
        weighted_sum_kernel[(tokens, triton.cdiv(columns, width))](
            choices, y, tokens, columns, K=k, WIDTH=width, ALIGNED=step, enable_fp_fusion=False
        )
    return y
