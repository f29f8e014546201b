# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (Triton's kernel language has no types that a checker knows; what is called from outside is annotated.)
"""One token through one packed matrix of several experts, in one launch.

An expert is found by the address of its slot, in which the matrix's fields lie at the same offsets for every expert.
A program owns a few rows of one expert and computes them as the single-token kernel of `triton_linear` does: same
blocks, same sums, and the alignment that a pointer argument would have shown the compiler is told to it. The number
of experts is in the grid alone, so that one compilation, hence one order of summation, serves any number.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiermoe.kernels.gpu.slot_matrix import SlotMatrix
from tiermoe.kernels.gpu.triton_linear import FUSE, aligned, blocks
from tiermoe.kernels.gpu.triton_tiles import row_sums

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _field(slot, offset, TYPE: tl.constexpr):
    """The pointer to a field of the slot at an address; 16 is `triton_linear.ALIGNMENT`."""
    return tl.multiple_of((slot + offset).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def _grouped_kernel(
    x, slots, y, N, K, codes_at, ladders_at, scale_at, zero_at,
    BITS: tl.constexpr, GROUP: tl.constexpr, TYPE: tl.constexpr, SHARED: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    slot = tl.load(slots + expert)
    codes = _field(slot, codes_at, tl.int8 if BITS == 8 else tl.uint8)
    ladders = _field(slot, ladders_at, tl.uint8)
    scale = _field(slot, scale_at, TYPE)
    zero = _field(slot, zero_at, TYPE)
    if not SHARED:
        x += expert * K
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    total = row_sums(x, codes, ladders, scale, zero, rows, N, K, BITS, GROUP, BN, BK)
    tl.store(y + expert * N + rows, total.to(y.dtype.element_ty), mask=rows < N)


def grouped_linear(x: Tensor, slots: Tensor, matrix: SlotMatrix, shared: bool) -> Tensor:
    """y[e] = W_e @ x_e -> (E, N) in the type of x, the values of one call of `triton_linear` for each expert.

    x (1, K) where `shared`, for all experts; otherwise (E, K), a row for each. `slots` (E,) int64: the addresses of the
    experts' slots, on x's device, multiples of 16. The slots are read when the launch runs: they must hold the
    experts until then.
    """
    experts, n, k = len(slots), matrix.rows, matrix.columns
    y = x.new_empty((experts, n))
    block = blocks(1, n, k)
    fields = (matrix.codes, matrix.ladders, matrix.scale, matrix.zero)
    sizes = {"BITS": matrix.bits, "GROUP": matrix.group, "BN": block.rows, "BK": block.columns}
    with torch.cuda.device(x.get_device()):  # Triton launches on the current device, which may be another
        _grouped_kernel[(triton.cdiv(n, block.rows), experts)](
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
