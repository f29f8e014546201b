"""Compiles the kernels for GPUs that need not be there; test_triton.py runs this in a process of its own."""

import itertools
import re

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tiermoe.kernels import triton_linear

SHARED_BYTES = 64 * 1024  # what a program may use on the smallest GPU named below
CAPABILITIES = {75: ("fp16",), 80: ("bf16", "fp32"), 90: ("bf16",)}  # Turing, Ampere, Hopper


def compiled(capability: int, dtype: str, bits: int, m: int, group: int):
    n, k = 1024, 2048
    block = triton_linear.blocks(m, n, k)
    kernel = triton_linear._vector_kernel if m == 1 else triton_linear._tiled_kernel
    sizes = {"BITS": bits, "GROUP": group, "BM": block.tokens, "BN": block.rows, "BK": block.columns}
    types = {"codes": "*u8" if bits == 4 else "*i8", "M": "i32", "N": "i32", "K": "i32"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in sizes else types.get(name, f"*{dtype}") for name in names}
    constants = {(names.index(name),): size for name, size in sizes.items() if name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"enable_fp_fusion": triton_linear.FUSE}
    return compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)


for capability, dtypes in CAPABILITIES.items():
    for dtype, bits, m in itertools.product(dtypes, (4, 8), (1, 40)):
        result = compiled(capability, dtype, bits, m, 64 if m == 1 else 256)
        assert result.asm["cubin"]
        assert not re.search(r"\b(atom|red)\.", result.asm["ptx"])
        assert "tf32" not in result.asm["ptx"]
        assert result.metadata.shared <= SHARED_BYTES, result.metadata.shared
        print("compiled", capability, dtype, bits, m)
