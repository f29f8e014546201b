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

Needs Triton: `tiermoe.kernels.gpu.cuda` imports this module on first use.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiermoe.kernels.gpu.triton_tiles import columns, row_sums, tile

# Bytes; below it Triton compiles another kernel, which may add in another order. Slot fields have more.
ALIGNMENT = 16
FUSE = True  # a * b + c rounds once: part of the result, so not left to Triton's default, which 3.10 changes


@triton.jit
def _vector_kernel(
    x, codes, ladders, scale, zero, y, N, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    total = row_sums(x, codes, ladders, scale, zero, rows, N, K, BITS, GROUP, BN, BK)
    tl.store(y + rows, total.to(y.dtype.element_ty), mask=rows < N)


# M not specialized: one compilation, hence one order, for every number of tokens in a block
@triton.jit(do_not_specialize=["M"])
def _tiled_kernel(
    x, codes, ladders, scale, zero, y, M, N, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    tokens = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in range(0, K, BK):
        k = columns(k0, BITS, GROUP, BK)
        inside = (tokens < M)[:, None] & (k < K)[None, :]
        values = tl.load(x + tokens[:, None] * K + k[None, :], mask=inside, other=0)
        w = tile(codes, ladders, scale, zero, rows, k0, N, K, BITS, GROUP, BK)
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
    return _launch(x, codes, codes, scale, zero, 4, _group(x, scale))


def int2_linear(x: Tensor, codes: Tensor, ladders: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """As int4_linear, of the levels of 4 bits that `codes` uint8 (4, N, K/16) and `ladders` uint8 (N, K/16) stand for
    (`quant.int2.RowMajorInt2`). Sums have an order of their own."""
    return _launch(x, codes, ladders, scale, zero, 2, _group(x, scale))


def int8_linear(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x (M, K) @ W.T -> (M, N) in the type of x; W[n, k] = codes[n, k] * scale[n].

    `codes` (N, K) int8, `scale` (N,) of any floating type, both contiguous.
    """
    return _launch(x, codes, codes, scale, scale, 8, 1)


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


def _launch(x: Tensor, codes: Tensor, ladders: Tensor, scale: Tensor, zero: Tensor, bits: int, group: int) -> Tensor:
    (m, k), n = x.shape, scale.shape[0]
    y = x.new_empty((m, n))
    x = aligned(x)
    block = blocks(m, n, k)
    across = triton.cdiv(n, block.rows)
    sizes = {"BITS": bits, "GROUP": group, "BN": block.rows, "BK": block.columns, "enable_fp_fusion": FUSE}
    with torch.cuda.device(x.get_device()):  # Triton launches on the current device, which may be another
        if m == 1:
            _vector_kernel[(across,)](x, codes, ladders, scale, zero, y, n, k, **sizes)
        else:
            grid = (across, triton.cdiv(m, block.tokens))
            _tiled_kernel[grid](x, codes, ladders, scale, zero, y, m, n, k, BM=block.tokens, **sizes)
    return y
