# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
# ruff: noqa: RUF005
# (as in triton_kernels.py)
"""The neuron unit on GPUs: active neurons computed from their records, and records put in their places in slots.

An expert's sum of a_j (w3_j . x) w2_j over its active neurons takes two launches for all experts of a token. The first
computes the products a_j (w3_j . x), a program for each neuron, which ends at once where a_j is 0. The second adds
their columns of W2, a program for some columns. Only records of active neurons are read. The order of summation follows
from the shape alone: both kernels go over all neurons, and those that are not active add zero.

Needs Triton: `gpu` imports this module on first use.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiermoe.formats.neurons import RecordPlace, Records
from tiermoe.kernels.triton_kernels import FUSE, TYPES, aligned

_BYTES = 512  # of W3 that a program of the products loads at a time, by one warp
_COLUMNS, _ROWS = 64, 16  # bytes of W2's columns that a program of the sums has, and neurons that it takes at a time
_WORDS = 256  # of 32 bits that the scatter moves at a time


@triton.jit
def _scales(
    record, group, mask, HALF: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, TWO_LEVEL: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Scale and zero, fp32, of groups of a half (0: W3, 1: W2) of records."""
    groups: tl.constexpr = WIDTH // GROUP
    size: tl.constexpr = TYPE.primitive_bitwidth // 8
    first: tl.constexpr = 2 * WIDTH * BITS // 8
    if TWO_LEVEL:
        at = record + (first + HALF * (2 * groups + size))
        unit = tl.load(at.to(tl.pointer_type(TYPE)) + 0 * group, mask=mask, other=0).to(tl.float32)
        step = tl.load(at + (size + group), mask=mask, other=0).to(tl.float32)
        offset = tl.load(at.to(tl.pointer_type(tl.int8)) + (size + groups + group), mask=mask, other=0).to(tl.float32)
        scale, zero = unit * step, unit * offset
    else:
        fields = (record + (first + HALF * 2 * groups * size)).to(tl.pointer_type(TYPE))
        scale = tl.load(fields + group, mask=mask, other=0).to(tl.float32)
        zero = tl.load(fields + (groups + group), mask=mask, other=0).to(tl.float32)
    return scale, zero


@triton.jit
def products_kernel(
    x, gates, tiles, products, N, records_at, RECORD: tl.constexpr, MIDDLE: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, TWO_LEVEL: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    neuron, expert = tl.program_id(0), tl.program_id(1)
    half: tl.constexpr = WIDTH * BITS // 8  # bytes of a half's codes
    place = expert * N + neuron
    gate = tl.load(gates + place).to(tl.float32)
    product = 0.0
    if gate != 0:
        at = tl.load(tiles + 3 * expert) + records_at + neuron.to(tl.int64) * RECORD
        record = tl.multiple_of(at.to(tl.pointer_type(tl.uint8)), 16)
        partial = tl.zeros((GROUPS,), dtype=tl.float32)
        for first in range(0, half // GROUP, GROUPS):
            group = first + tl.arange(0, GROUPS)
            inside = group < half // GROUP
            byte = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            packed = tl.load(record + byte, mask=inside[:, None], other=0).to(tl.int32)
            for strip in tl.static_range(8 // BITS):
                code = (packed >> BITS * strip & (1 << BITS) - 1).to(tl.float32) - MIDDLE
                values = tl.load(x + (strip * half + byte), mask=inside[:, None], other=0).to(tl.float32)
                of_strip = strip * (half // GROUP) + group
                scale, zero = _scales(record, of_strip, inside, 0, WIDTH, GROUP, BITS, TWO_LEVEL, TYPE)
                partial += scale * tl.sum(code * values, axis=1) + zero * tl.sum(values, axis=1)
        product = gate * tl.sum(partial)
    tl.store(products + place, product)


@triton.jit
def sums_kernel(
    products, tiles, y, N, records_at, RECORD: tl.constexpr, MIDDLE: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, TWO_LEVEL: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = WIDTH * BITS // 8
    expert = tl.program_id(1)
    start = tl.load(tiles + 3 * expert) + records_at
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    inside = group < half // GROUP
    byte = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    totals = ()
    for _strip in tl.static_range(8 // BITS):
        totals = totals + (tl.zeros((ROWS, GROUPS, GROUP), dtype=tl.float32),)
    for first in range(0, N, ROWS):
        neuron = first + tl.arange(0, ROWS)
        product = tl.load(products + expert * N + neuron, mask=neuron < N, other=0)
        mask = (product != 0)[:, None] & inside[None, :]
        record = tl.multiple_of((start + neuron.to(tl.int64) * RECORD).to(tl.pointer_type(tl.uint8)), 16)
        packed = tl.load(record[:, None, None] + (half + byte)[None, :, :], mask=mask[:, :, None], other=0).to(tl.int32)
        added = ()
        for strip in tl.static_range(8 // BITS):
            code = (packed >> BITS * strip & (1 << BITS) - 1).to(tl.float32) - MIDDLE
            of_strip = strip * (half // GROUP) + group[None, :]
            scale, zero = _scales(record[:, None], of_strip, mask, 1, WIDTH, GROUP, BITS, TWO_LEVEL, TYPE)
            scale, zero = product[:, None] * scale, product[:, None] * zero
            added = added + (totals[strip] + (code * scale[:, :, None] + zero[:, :, None]),)
        totals = added
    for strip in tl.static_range(8 // BITS):
        total = tl.sum(totals[strip], axis=0)
        column = expert * WIDTH + strip * half + byte
        tl.store(y + column, total.to(y.dtype.element_ty), mask=inside[:, None])


@triton.jit
def scatter_kernel(staged, WORDS: tl.constexpr):
    entry = staged.to(tl.pointer_type(tl.int64)) + 3 * tl.program_id(0)
    target = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int32)), 16)
    source = tl.multiple_of((staged + tl.load(entry + 1)).to(tl.pointer_type(tl.int32)), 16)
    words = tl.multiple_of(tl.load(entry + 2) // 4, 4)
    for first in range(0, words, WORDS):
        word = first + tl.arange(0, WORDS)
        tl.store(target + word, tl.load(source + word, mask=word < words, other=0), mask=word < words)


def constants_of(records: Records, width: int, dtype: torch.dtype) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Blocks of the columns of W2 (width, I), and the constants of the two kernels, from the shape alone. dtype: of the
    records' scales."""
    groups = width // records.strips // records.group
    shared = {
        "RECORD": records.record_bytes(width, dtype), "MIDDLE": records.middle, "WIDTH": width, "GROUP": records.group,
        "BITS": records.bits, "TWO_LEVEL": records.two_level, "TYPE": TYPES[dtype], "enable_fp_fusion": FUSE,
    }  # fmt: skip
    at_once, block = min(triton.next_power_of_2(groups), _BYTES // records.group), _COLUMNS // records.group
    products = {**shared, "GROUPS": at_once, "num_warps": 1}
    return triton.cdiv(groups, block), products, {**shared, "GROUPS": block, "ROWS": _ROWS}


def neuron_sums(
    x: Tensor, gates: Tensor, tiles: Tensor, records: Records, place: RecordPlace, dtype: torch.dtype
) -> Tensor:
    """y[e] = the sum over neurons j of gates[e, j] (w3_j . x) w2_j -> (E, H) in the type of x. Records of neurons whose
    gate is 0 are not read.

    x (1, H); gates (E, I); tiles int64 (E, 3), of `tiles_of` for one token of each expert, on x's device. place, dtype:
    where `records` lie in a slot, and the type of their scales. The slots are read when the launches run."""
    experts, width = len(tiles), x.shape[1]
    gates, x = gates.contiguous(), aligned(x)
    products = torch.empty(gates.shape, dtype=torch.float32, device=x.device)
    y = x.new_empty((experts, width))
    neurons, at = place.neurons, place.slot_at
    blocks, of_products, of_sums = constants_of(records, width, dtype)
    with torch.cuda.device(x.get_device()):  # Triton launches on the current device, which may be another
        products_kernel[(neurons, experts)](x, gates, tiles, products, neurons, at, **of_products)
        sums_kernel[(blocks, experts)](products, tiles, y, neurons, at, **of_sums)
    return y


def scatter(staged: Tensor, count: int) -> None:
    """Puts `count` records in their places. staged, uint8: begins with int64 (count, 3), the address of each record's
    place, the byte of `staged` at which the record lies, and its bytes, all multiples of 16."""
    with torch.cuda.device(staged.get_device()):
        scatter_kernel[(count,)](staged, WORDS=_WORDS)
