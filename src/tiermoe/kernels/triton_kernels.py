# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (Triton's kernel language has no types that a checker knows; what is called from outside is annotated.)
"""Linear layers on packed weights for GPUs: y = x @ W.T, W in 2, 4 or 8 bits and decoded inside the kernel.

One token goes through a matrix-vector kernel: a program owns a few rows of W, keeps one fp32 partial sum per
column of its tile and adds them up once at the end. More tokens go through a tiled kernel: a tile of W is
decoded, rounded to the type of x and multiplied, accumulating in fp32; fp32 inputs are multiplied as fp32,
never as TF32.

The order of summation follows from (M, N, K), the types and the group alone: K is not split between programs,
there are no atomics, and block sizes are a fixed function of the shape. Autotuning is left out on purpose: it
picks block sizes by timing, so that two runs could add in two orders and differ in the last bit. What is
fixed is the order on one GPU model under one version of Triton; another compiler may choose another. The
block sizes follow from reasoning about loads per program; they have not been tuned on hardware.

Several experts in one launch (`grouped_linear`): an expert is found by the address of its slot, in which the matrix's
fields lie at the same offsets for every expert. A program owns a few rows of one expert and computes them as the
single-token kernel does: same blocks, same sums, and the alignment that a pointer argument would have shown the
compiler is told to it. The number of experts is in the grid alone, so that one compilation, hence one order of
summation, serves any number.

Needs Triton: `gpu` imports this module on first use.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Bytes; below it Triton compiles another kernel, which may add in another order. Slot fields have more.
ALIGNMENT = 16
FUSE = True  # a * b + c rounds once: part of the result, so not left to Triton's default, which 3.10 changes


@triton.jit
def _int4_tile(codes, scale, zero, rows, k0, N, K, GROUP: tl.constexpr, BK: tl.constexpr):
    """Decodes W[rows, k0:k0+BK] to fp32, zero outside (N, K)."""
    half: tl.constexpr = BK // 2
    bytes_k = k0 // 2 + tl.arange(0, half)
    inside = (rows < N)[:, None] & (bytes_k < K // 2)[None, :]
    packed = tl.load(codes + rows[:, None] * (K // 2) + bytes_k[None, :], mask=inside, other=0)
    signed = tl.interleave(packed & 15, packed >> 4).to(tl.float32) - 8
    return _scaled(signed, scale, zero, rows, k0, N, K, GROUP, BK)


@triton.jit
def _int2_tile(codes, scale, zero, rows, k0, N, K, GROUP: tl.constexpr, BK: tl.constexpr):
    """As _int4_tile, of four codes a byte."""
    quarter: tl.constexpr = BK // 4
    bytes_k = k0 // 4 + tl.arange(0, quarter)
    inside = (rows < N)[:, None] & (bytes_k < K // 4)[None, :]
    packed = tl.load(codes + rows[:, None] * (K // 4) + bytes_k[None, :], mask=inside, other=0)
    even, odd = tl.interleave(packed & 3, packed >> 4 & 3), tl.interleave(packed >> 2 & 3, packed >> 6)
    return _scaled(tl.interleave(even, odd).to(tl.float32) - 2, scale, zero, rows, k0, N, K, GROUP, BK)


@triton.jit
def _scaled(signed, scale, zero, rows, k0, N, K, GROUP: tl.constexpr, BK: tl.constexpr):
    """signed * scale + zero, of the groups of columns k0:k0+BK."""
    span: tl.constexpr = min(GROUP, BK)
    groups_k = k0 // GROUP + tl.arange(0, BK // span)
    inside_groups = (rows < N)[:, None] & (groups_k < K // GROUP)[None, :]
    at = rows[:, None] * (K // GROUP) + groups_k[None, :]
    s = tl.load(scale + at, mask=inside_groups, other=0).to(tl.float32)
    z = tl.load(zero + at, mask=inside_groups, other=0).to(tl.float32)
    grouped = tl.reshape(signed, (signed.shape[0], BK // span, span))
    return tl.reshape(grouped * s[:, :, None] + z[:, :, None], (signed.shape[0], BK))


@triton.jit
def _int8_tile(codes, rows, k0, N, K, BK: tl.constexpr):
    """The codes of W[rows, k0:k0+BK] as fp32, zero outside (N, K); the row's scale is applied to the sum."""
    k = k0 + tl.arange(0, BK)
    inside = (rows < N)[:, None] & (k < K)[None, :]
    return tl.load(codes + rows[:, None] * K + k[None, :], mask=inside, other=0).to(tl.float32)


@triton.jit
def tile(
    codes, scale, zero, rows, k0, N, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """W[rows, k0:k0+BK] as fp32, zero outside (N, K); at 8 bits the codes, whose scale is applied to the sum."""
    if BITS == 4:
        w = _int4_tile(codes, scale, zero, rows, k0, N, K, GROUP, BK)
    elif BITS == 2:
        w = _int2_tile(codes, scale, zero, rows, k0, N, K, GROUP, BK)
    else:
        w = _int8_tile(codes, rows, k0, N, K, BK)
    return w


@triton.jit
def row_sums(
    x, codes, scale, zero, rows, N, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """W[rows] @ x for x (K), as fp32 (BN): one partial sum per column of a tile, added up once at the end."""
    partial = tl.zeros((BN, BK), dtype=tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        values = tl.load(x + k, mask=k < K, other=0).to(tl.float32)
        w = tile(codes, scale, zero, rows, k0, N, K, BITS, GROUP, BK)
        partial += w * values[None, :]
    total = tl.sum(partial, axis=1)
    if BITS == 8:
        total *= tl.load(scale + rows, mask=rows < N, other=0).to(tl.float32)
    return total


@triton.jit
def vector_kernel(
    x, codes, scale, zero, y, N, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    total = row_sums(x, codes, scale, zero, rows, N, K, BITS, GROUP, BN, BK)
    tl.store(y + rows, total.to(y.dtype.element_ty), mask=rows < N)


# M not specialized: one compilation, hence one order, for every number of tokens in a block
@triton.jit(do_not_specialize=["M"])
def tiled_kernel(
    x, codes, scale, zero, y, M, N, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    tokens = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        inside = (tokens < M)[:, None] & (k < K)[None, :]
        values = tl.load(x + tokens[:, None] * K + k[None, :], mask=inside, other=0)
        w = tile(codes, scale, zero, rows, k0, N, K, BITS, GROUP, BK)
        total = tl.dot(values, tl.trans(w.to(values.dtype)), total, input_precision="ieee")
    if BITS == 8:
        total *= tl.load(scale + rows, mask=rows < N, other=0).to(tl.float32)[None, :]
    inside = (tokens < M)[:, None] & (rows < N)[None, :]
    tl.store(y + tokens[:, None] * N + rows[None, :], total.to(y.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Blocks:
    """Tokens, rows of W and columns of W that one program works on at a time; all powers of two."""

    tokens: int
    rows: int
    columns: int


def blocks(m: int, n: int, k: int) -> Blocks:
    """Block sizes for x (m, k) and W (n, k), from the shape alone.

    One token: few rows per program, so that 1,000 rows still occupy a large GPU, and long stretches of each
    row. Up to 16 tokens share one block, the least height of a tensor-core tile, so that a token's result
    does not depend on how many of the 16 places are taken.
    """
    longest = max(16, triton.next_power_of_2(k))
    if m == 1:
        return Blocks(1, 8 if n >= 4096 else 4, min(512, longest))
    if m <= 16:
        return Blocks(16, 32, min(128, longest))
    return Blocks(64, 64, min(64, longest))


def int4_linear(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x (M, K) @ W.T -> (M, N) in the type of x; w = (code - 8) * scale + zero.

    `codes` (N, K/2) uint8 holds two codes 0..15 a byte, the even column's in the low nibble; `scale` and
    `zero` (N, K/G), of any floating type, hold for G columns each. All contiguous. Raises ValueError where G
    is no power of two.
    """
    return _launch(x, codes, scale, zero, 4, _group(x, scale))


def int2_linear(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """As int4_linear, of `codes` (N, K/4) with four codes 0..3 a byte, the first column's in its lowest bits:
    w = (code - 2) * scale + zero."""
    return _launch(x, codes, scale, zero, 2, _group(x, scale))


def int8_linear(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x (M, K) @ W.T -> (M, N) in the type of x; W[n, k] = codes[n, k] * scale[n].

    `codes` (N, K) int8, `scale` (N,) of any floating type, both contiguous.
    """
    return _launch(x, codes, scale, scale, 8, 1)


def _group(x: Tensor, scale: Tensor) -> int:
    """Columns to a scale. ValueError where they are no power of two."""
    group = x.shape[1] // scale.shape[1]
    if group & (group - 1):
        raise ValueError(f"groups of {group}: the kernels take powers of two")
    return group


def aligned(x: Tensor) -> Tensor:
    """x, contiguous from a multiple of `ALIGNMENT` on; a copy where it does not lie so."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def _launch(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bits: int, group: int) -> Tensor:
    (m, k), n = x.shape, scale.shape[0]
    y = x.new_empty((m, n))
    x = aligned(x)
    block = blocks(m, n, k)
    across = triton.cdiv(n, block.rows)
    sizes = {"BITS": bits, "GROUP": group, "BN": block.rows, "BK": block.columns, "enable_fp_fusion": FUSE}
    with torch.cuda.device(x.get_device()):  # Triton launches on the current device, which may be another
        if m == 1:
            vector_kernel[(across,)](x, codes, scale, zero, y, n, k, **sizes)
        else:
            grid = (across, triton.cdiv(m, block.tokens))
            tiled_kernel[grid](x, codes, scale, zero, y, m, n, k, BM=block.tokens, **sizes)
    return y


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _field(slot, offset, TYPE: tl.constexpr):
    """The pointer to a field of the slot at an address; 16 is `ALIGNMENT`."""
    return tl.multiple_of((slot + offset).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def grouped_kernel(
    x, slots, y, N, K, codes_at, scale_at, zero_at,
    BITS: tl.constexpr, GROUP: tl.constexpr, TYPE: tl.constexpr, SHARED: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    slot = tl.load(slots + expert)
    codes = _field(slot, codes_at, tl.int8 if BITS == 8 else tl.uint8)
    scale = _field(slot, scale_at, TYPE)
    zero = _field(slot, zero_at, TYPE)
    if not SHARED:
        x += expert * K
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    total = row_sums(x, codes, scale, zero, rows, N, K, BITS, GROUP, BN, BK)
    tl.store(y + expert * N + rows, total.to(y.dtype.element_ty), mask=rows < N)


@dataclass(frozen=True)
class SlotMatrix:
    """A packed matrix (rows, columns) in a slot. `codes`, `scale`, `zero`: where its fields begin, in bytes from the
    slot's first one, multiples of 16. bits 2 and 4: fields as `int2_linear` and `int4_linear` take them, `group`
    columns to a scale; bits 8: as `int8_linear` does, `group` and `zero` unused. `dtype` is that of scales and
    zeros."""

    rows: int
    columns: int
    bits: int
    group: int
    dtype: torch.dtype
    codes: int
    scale: int
    zero: int


def grouped_linear(x: Tensor, slots: Tensor, matrix: SlotMatrix, shared: bool) -> Tensor:
    """y[e] = W_e @ x_e -> (E, N) in the type of x, the values of one call of a linear kernel for each expert.

    x (1, K) where `shared`, for all experts; otherwise (E, K), a row for each. `slots` (E,) int64: the addresses of the
    experts' slots, on x's device, multiples of 16. The slots are read when the launch runs: they must hold the
    experts until then.
    """
    experts, n, k = len(slots), matrix.rows, matrix.columns
    y = x.new_empty((experts, n))
    block = blocks(1, n, k)
    fields = (matrix.codes, matrix.scale, matrix.zero)
    sizes = {"BITS": matrix.bits, "GROUP": matrix.group, "BN": block.rows, "BK": block.columns}
    with torch.cuda.device(x.get_device()):  # Triton launches on the current device, which may be another
        grouped_kernel[(triton.cdiv(n, block.rows), experts)](
            aligned(x),
            slots,
            y,
            n,
            k,
            *fields,
            TYPE=_TYPES[matrix.dtype],
            SHARED=shared,
            enable_fp_fusion=FUSE,
            **sizes,
        )
    return y
