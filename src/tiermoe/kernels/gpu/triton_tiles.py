# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (Triton's kernel language has no types that a checker knows.)
"""What the kernels on packed weights share: tiles of W decoded, and the sums of one token's rows.

Used inside kernels alone. The order in which `row_sums` adds is that of every single-token result, whichever kernel
asks for it.
"""

import triton
import triton.language as tl


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
def _int2_tile(codes, ladders, scale, zero, rows, k0, N, K, GROUP: tl.constexpr, BK: tl.constexpr):
    """As _int4_tile, of 2 bits within the levels of 4 (`quant.ladders`), with the columns as `columns` has them."""
    sixteenth: tl.constexpr = BK // 16
    bytes_k = k0 // 16 + tl.arange(0, sixteenth)
    inside = (rows < N)[:, None] & (bytes_k < K // 16)[None, :]
    at = rows[:, None] * (K // 16) + bytes_k[None, :]
    plane = N * (K // 16)
    first = tl.load(codes + at, mask=inside, other=0)
    second = tl.load(codes + plane + at, mask=inside, other=0)
    third = tl.load(codes + 2 * plane + at, mask=inside, other=0)
    fourth = tl.load(codes + 3 * plane + at, mask=inside, other=0)
    chosen = tl.load(ladders + at, mask=inside, other=0)
    planes = tl.join(tl.join(first, third), tl.join(second, fourth))  # in a byte's order: first to fourth
    place = tl.arange(0, 4)[None, None, None, :]
    pairs = tl.reshape(planes, (rows.shape[0], sixteenth, 4, 1)).to(tl.int32)
    code = pairs >> (place % 2 * 4 + place // 2 * 2) & 3
    ladder = chosen.to(tl.int32)[:, :, None, None] >> (place % 2 * 4)
    low = ladder & 3
    level = code * (low + 2) + (ladder >> 2 & 3) * (3 - low)
    signed = tl.reshape(level, (rows.shape[0], BK)).to(tl.float32) - 8
    return _scaled(signed, scale, zero, rows, k0, N, K, GROUP, BK)


@triton.jit
def columns(k0, BITS: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr):
    """Which columns of W the tile from k0 holds, in its order: k0:k0+BK, at 2 bits those of its bytes, whose 16 weights
    are two neighbours in each eighth of a group."""
    at = k0 + tl.arange(0, BK)
    if BITS == 2:
        width: tl.constexpr = GROUP // 8
        stripe = at // 16 * 2 + at % 2
        eighth = at % 16 // 4 + at % 4 // 2 * 4
        at = stripe // width * GROUP + eighth * width + stripe % width
    return at


@triton.jit
def _scaled(signed, scale, zero, rows, k0, N, K, GROUP: tl.constexpr, BK: tl.constexpr):
    """signed * scale + zero, of the groups of columns k0:k0+BK; a group's columns in any order."""
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
    codes, ladders, scale, zero, rows, k0, N, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """W[rows, columns(k0, …)] as fp32, zero outside (N, K); at 8 bits the codes, whose scale is applied to the sum."""
    if BITS == 4:
        w = _int4_tile(codes, scale, zero, rows, k0, N, K, GROUP, BK)
    elif BITS == 2:
        w = _int2_tile(codes, ladders, scale, zero, rows, k0, N, K, GROUP, BK)
    else:
        w = _int8_tile(codes, rows, k0, N, K, BK)
    return w


@triton.jit
def row_sums(
    x, codes, ladders, scale, zero, rows, N, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """W[rows] @ x for x (K), as fp32 (BN): one partial sum per column of a tile, added up once at the end."""
    partial = tl.zeros((BN, BK), dtype=tl.float32)
    for k0 in range(0, K, BK):
        k = columns(k0, BITS, GROUP, BK)
        values = tl.load(x + k, mask=k < K, other=0).to(tl.float32)
        w = tile(codes, ladders, scale, zero, rows, k0, N, K, BITS, GROUP, BK)
        partial += w * values[None, :]
    total = tl.sum(partial, axis=1)
    if BITS == 8:
        total *= tl.load(scale + rows, mask=rows < N, other=0).to(tl.float32)
    return total
