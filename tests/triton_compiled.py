"""Compiles the kernels for GPUs that need not be there, of the compute capabilities given; test_triton.py runs this in
a process of its own."""

import itertools
import re
import sys

import triton.language as tl
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tiermoe.kernels import triton_kernels

SHARED_BYTES = 64 * 1024  # what a program may use on the smallest GPU named below
LOADS = 16  # of one token's kernel, in the code of a tile: codes come by bytes or wider, a scale once for a thread
CAPABILITIES = {75: ("fp16",), 80: ("bf16", "fp32"), 90: ("bf16",)}  # Turing, Ampere, Hopper
TYPES = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}
ONE_TOKEN, GROUPED, TILED = triton_kernels.vector_kernel, triton_kernels.grouped_kernel, triton_kernels.tiled_kernel


def compiled(kernel, capability: int, dtype: str, bits: int, group: int, shared: bool = False):
    n, k = 1024, 2048
    block = triton_kernels.blocks(40 if kernel is TILED else 1, n, k)
    sizes = {"BITS": bits, "GROUP": group, "BM": block.tokens, "BN": block.rows, "BK": block.columns}
    sizes |= {"TYPE": TYPES[dtype], "SHARED": shared}
    numbers = dict.fromkeys(("M", "N", "K", "codes_at", "scale_at", "zero_at"), "i32")
    types = {"codes": "*i8" if bits == 8 else "*u8", "slots": "*i64", **numbers}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in sizes else types.get(name, f"*{dtype}") for name in names}
    constants = {(names.index(name),): size for name, size in sizes.items() if name in names}
    multiples = [i for i, name in enumerate(names) if signature[name][0] in "*i" and name != "M"]
    aligned = {(i,): [["tt.divisibility", 16]] for i in multiples}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"enable_fp_fusion": triton_kernels.FUSE}
    result = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert result.asm["cubin"]
    assert not re.search(r"\b(atom|red)\.", result.asm["ptx"])
    assert "tf32" not in result.asm["ptx"]
    assert result.metadata.shared <= SHARED_BYTES, result.metadata.shared
    print("compiled", kernel.__name__, capability, dtype, bits)
    return result


def order_of_sums(result) -> tuple[list[str], list[str]]:
    """What decides it: which thread holds which values, and the float operations and exchanges in their order. Few
    loads bring the weights."""
    held = re.findall(r"^#\w+ = #ttg.*", result.asm["ttgir"], re.M)
    assert result.asm["ptx"].count("ld.global") <= LOADS
    return held, re.findall(r"\b(?:(?:fma|add|sub|mul)\.(?:rn\.)?f32|shfl\.sync\.\w+)\b", result.asm["ptx"])


for capability in map(int, sys.argv[1:]):
    for dtype, bits in itertools.product(CAPABILITIES[capability], (2, 4, 8)):
        compiled(TILED, capability, dtype, bits, 256)
        alone = order_of_sums(compiled(ONE_TOKEN, capability, dtype, bits, 64))
        assert "shfl.sync.bfly" in alone[1], alone
        assert "fma.rn.f32" in alone[1], alone
        for shared in (True, False):
            assert order_of_sums(compiled(GROUPED, capability, dtype, bits, 64, shared)) == alone
