# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (Triton's kernel language has no types that a checker knows.)
"""What the kernels on packed weights share: tiles of W decoded, and the sums of one token's rows.

Used inside kernels alone. The order in which `row_sums` adds is that of every single-token result, whichever kernel
asks for it.
"""

import triton
import triton.language as tl


@triton.jit
def int4_tile(codes, scale, zero, rows, k0, N, K, GROUP: tl.constexpr, BK: tl.constexpr):
    """Decodes W[rows, k0:k0+BK] to fp32, zero outside (N, K)."""
    half: tl.constexpr = BK // 2
    bytes_k = k0 // 2 + tl.arange(0, half)
    inside = (rows < N)[:, None] & (bytes_k < K // 2)[None, :]
    packed = tl.load(codes + rows[:, None] * (K // 2) + bytes_k[None, :], mask=inside, other=0)
    signed = tl.interleave(packed & 15, packed >> 4).to(tl.float32) - 8
    return _scaled(signed, scale, zero, rows, k0, N, K, GROUP, BK)


@triton.jit
def int2_tile(codes, ladders, scale, zero, rows, k0, N, K, GROUP: tl.constexpr, BK: tl.constexpr):
    """As int4_tile, of 2 bits within the levels of 4 (`quant.ladders`): the values of the same levels in 4 bits."""
    width: tl.constexpr = GROUP // 8
    k = k0 + tl.arange(0, BK)
    eighth = k % GROUP // width
    nibble = k // GROUP * width + k % width
    shift = nibble % 2 * 4
    inside = (rows < N)[:, None] & (k < K)[None, :]
    at = rows[:, None] * (K // 16) + (nibble // 2)[None, :]
    pairs = tl.load(codes + (eighth % 4 * N * (K // 16))[None, :] + at, mask=inside, other=0).to(tl.int32)
    code = pairs >> (shift + eighth // 4 * 2)[None, :] & 3
    ladder = tl.load(ladders + at, mask=inside, other=0).to(tl.int32) >> shift[None, :]
    low = ladder & 3
    level = code * (low + 2) + (ladder >> 2 & 3) * (3 - low)
    return _scaled(level.to(tl.float32) - 8, scale, zero, rows, k0, N, K, GROUP, BK)


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
def int8_tile(codes, rows, k0, N, K, BK: tl.constexpr):
    """The codes of W[rows, k0:k0+BK] as fp32, zero outside (N, K); the row's scale is applied to the sum."""
    k = k0 + tl.arange(0, BK)
    inside = (rows < N)[:, None] & (k < K)[None, :]
    return tl.load(codes + rows[:, None] * K + k[None, :], mask=inside, other=0).to(tl.float32)


@triton.jit
def row_sums(
    x, codes, ladders, scale, zero, rows, N, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """W[rows] @ x for x (K), as fp32 (BN): one partial sum per column of a tile, added up once at the end."""
    partial = tl.zeros((BN, BK), dtype=tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        values = tl.load(x + k, mask=k < K, other=0).to(tl.float32)
        if BITS == 4:
            w = int4_tile(codes, scale, zero, rows, k0, N, K, GROUP, BK)
        elif BITS == 2:
            w = int2_tile(codes, ladders, scale, zero, rows, k0, N, K, GROUP, BK)
        else:
            w = int8_tile(codes, rows, k0, N, K, BK)
        partial += w * values[None, :]
    total = tl.sum(partial, axis=1)
    if BITS == 8:
        total *= tl.load(scale + rows, mask=rows < N, other=0).to(tl.float32)
    return total
