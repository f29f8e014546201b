"""Compiles the kernels for GPUs that need not be there: `python triton_compiled.py CAPABILITY CODING…`; test_triton.py
runs this in a process of its own, in which ptxas tells what a kernel uses (TRITON_DUMP_PTXAS_LOG)."""

import re
import sys

import torch
import triton.language as tl
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from neuron_sources import CODES
from tiermoe.formats.neurons import records_for
from tiermoe.kernels import triton_attention, triton_kernels, triton_neurons

SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 89: 99 << 10, 90: 227 << 10}  # what a program may use
CAPABILITIES = {75: ("fp16",), 80: ("bf16", "fp32"), 89: ("bf16",), 90: ("bf16",)}  # Turing, Ampere, Ada, Hopper
TYPES = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}
TORCH = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
GROUPS = {"INT4": 64, "INT2": 64, "INT6": 32, "NL4": 32, "NL3": 64, "NL2": 64, "TCQ2": 128, "INT8": 1}
ONE_TOKEN, GROUPED, TILED = triton_kernels.vector_kernel, triton_kernels.grouped_kernel, triton_kernels.tiled_kernel


def compiled(kernel, capability: int, dtype: str, coding: str, tokens: int = 1, shared: bool = False):
    ((_, _, sizes),) = triton_kernels.launches(coding, GROUPS[coding], tokens, 1024, 2048)
    options = {"num_warps": sizes.pop("num_warps", 4), "enable_fp_fusion": sizes.pop("enable_fp_fusion")}
    table = coding[:2] in ("NL", "TC")
    sizes |= {"TYPE": TYPES[dtype], "BIASED": False, "SHARED": shared, "TOKENS": tokens} | (
        {} if table else {"levels": None}
    )
    numbers = dict.fromkeys(("M", "N", "K", "first", "codes_at", "scales_at", "bias_at"), "i32")
    types = {"codes": "*i8" if coding == "INT8" else "*u8", "levels": "*fp32", **numbers}
    if coding.startswith("NL"):
        types["scales"] = "*u8"  # the blocks have both
    return compiled_with(kernel, capability, dtype, coding, sizes, types, options)


def compiled_with(kernel, capability: int, dtype: str, what: str, sizes: dict, types: dict, options: dict):
    names, types = kernel.arg_names, {"tiles": "*i64", "choices": "*i64", **types}
    signature = {name: "constexpr" if name in sizes else types.get(name, f"*{dtype}") for name in names}
    constants = {(names.index(name),): size for name, size in sizes.items() if name in names}
    multiples = [i for i, name in enumerate(names) if signature[name][0] in "*i" and name != "tiles"]
    specialized = [i for i in multiples if not kernel.params[i].do_not_specialize]
    aligned = {(i,): [["tt.divisibility", 16]] for i in specialized}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    result = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert result.asm["cubin"]
    assert not re.search(r"\b(atom|red)\.", result.asm["ptx"])
    assert "tf32" not in result.asm["ptx"]
    assert result.metadata.shared <= SHARED_BYTES[capability], result.metadata.shared
    print("compiled", kernel.__name__, capability, dtype, what, sizes.get("TOKENS", sizes.get("HEADS", 1)))
    return result


def compiled_for_neurons(capability: int, dtype: str) -> None:
    """The kernels of the neuron unit, for each kind of records."""
    pointers = {"products": "*fp32", "staged": "*u8", "N": "i32", "records_at": "i32"}
    for bits, quantizer in CODES:
        records = records_for(bits, 2048, quantizer)
        _, products, sums = triton_neurons.constants_of(records, 2048, getattr(torch, TORCH[dtype]))
        for kernel, sizes in ((triton_neurons.products_kernel, products), (triton_neurons.sums_kernel, sums)):
            options = {"num_warps": sizes.pop("num_warps", 4), "enable_fp_fusion": sizes.pop("enable_fp_fusion")}
            result = compiled_with(kernel, capability, dtype, records.name, sizes, pointers, options)
            codes_are_vectors(result.asm["ptx"])
    if dtype == CAPABILITIES[capability][0]:  # it moves bytes
        compiled_with(triton_neurons.scatter_kernel, capability, dtype, "records", {"WORDS": 256}, pointers, {})


def compiled_for_attention(capability: int, dtype: str) -> None:
    """The kernels of a token's attention, of grouped heads and of latents."""
    pointers = {"place": "*i64", "scale": "fp32", **dict.fromkeys(("weighed", "maxima", "totals", "sinks"), "*fp32")}
    strides = [f"{each}_{of}" for each in ("key", "value") for of in ("slab", "head", "row")]
    types = {**pointers, **dict.fromkeys(("room", "splits", *strides), "i32")}
    for group, columns, value_columns in ((8, 128, 128), (16, 576, 512)):
        rows = {"KEY_ROW": columns, "VALUE_ROW": columns, "KEYS_ALIGNED": 16, "VALUES_ALIGNED": 16}
        itemsize = getattr(torch, TORCH[dtype]).itemsize
        split, combine = triton_attention.constants_of(group, columns, value_columns, itemsize, 4096, False)
        kernels = (triton_attention.split_kernel, split | rows), (triton_attention.combine_kernel, combine)
        for kernel, sizes in kernels:
            options = {
                name: sizes.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion") if name in sizes
            }
            ptx = compiled_with(kernel, capability, dtype, f"columns-{columns}", sizes, types, options).asm["ptx"]
            if "HEADS" in sizes and capability >= 80 and dtype != "fp32":
                assert "mma.sync" in ptx
                copied = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, (0x\w+|\d+),", ptx)
                assert set(copied) == {"0x10"}, copied
    sizes = {"KEY_COLUMNS": 576, "VALUE_COLUMNS": 512, "WIDTH": 1024}
    compiled_with(triton_attention.write_row_kernel, capability, dtype, "row", sizes, types, {})


def codes_are_vectors(ptx: str) -> None:
    assert re.search(r"ld\.global(?:\.L1::\w+)*\.v[24]\.b32", ptx)


def order_of_sums(result) -> tuple[list[str], list[str]]:
    """What decides it: which thread holds which values, and the float operations and exchanges in their order."""
    held = re.findall(r"^#\w+ = #ttg.*", result.asm["ttgir"], re.M)
    return held, re.findall(r"\b(?:(?:fma|add|sub|mul)\.(?:rn\.)?f32|shfl\.sync\.\w+)\b", result.asm["ptx"])


def codes_come_in_16_bytes(ptx: str, coding: str) -> None:
    """At least four columns of 32 rows a thread, at so many bits each."""
    bits = int(re.findall(r"\d", coding)[0])
    wide = len(re.findall(r"ld\.global(?:\.L1::\w+)*\.v4\.b32", ptx))
    assert wide >= 4 * 32 * bits // 128, (coding, wide)


capability = int(sys.argv[1])
for dtype in CAPABILITIES[capability]:
    compiled_for_neurons(capability, dtype)
    compiled_for_attention(capability, dtype)
    numbers = dict.fromkeys("TH", "i32")
    sizes, options = {"K": 8, "WIDTH": 1024, "ALIGNED": 16}, {"num_warps": 4, "enable_fp_fusion": False}
    added = compiled_with(triton_kernels.weighted_sum_kernel, capability, dtype, "sums", sizes, numbers, options)
    assert "fma.rn" not in added.asm["ptx"]  # products are rounded before they are added
    for coding in sys.argv[2:]:
        for tokens in (16, 64):
            tiled = order_of_sums(compiled(TILED, capability, dtype, coding, tokens))
            assert order_of_sums(compiled(GROUPED, capability, dtype, coding, tokens)) == tiled
        one = compiled(ONE_TOKEN, capability, dtype, coding)
        if coding != "INT8":
            codes_come_in_16_bytes(one.asm["ptx"], coding)
        alone = order_of_sums(one)
        assert "shfl.sync.bfly" in alone[1], alone
        assert "fma.rn.f32" in alone[1], alone
        for shared in (True, False):
            assert order_of_sums(compiled(GROUPED, capability, dtype, coding, shared=shared)) == alone
