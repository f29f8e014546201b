"""The encodings by name, and which one a matrix gets."""

import re
from collections.abc import Callable

import torch

from tiermoe.errors import ConfigError, StoreError
from tiermoe.quant import int4_layout, int6_layout, uneven
from tiermoe.quant.encoding import COMPUTE_DTYPES, Encoding, Field
from tiermoe.quant.gguf import PREFIX as GGUF
from tiermoe.quant.gguf import gguf_encoding
from tiermoe.quant.int2 import Int2, RowMajorInt2
from tiermoe.quant.int4 import Int4
from tiermoe.quant.int4_layout import cpu_layout
from tiermoe.quant.int6 import Int6
from tiermoe.quant.int8 import Int8
from tiermoe.quant.mixed import HALVES, VALUES, halves_encoding, values_encoding
from tiermoe.quant.plain import Plain
from tiermoe.quant.published import PREFIX as PUBLISHED
from tiermoe.quant.published import published_encoding
from tiermoe.quant.quantizers import CALIBRATED, GPTQ, GPTQ_NONLINEAR, NONLINEAR
from tiermoe.quant.rowmajor import LAYOUT as ROW_MAJOR
from tiermoe.quant.rowmajor import RowMajorInt4
from tiermoe.quant.transposed4 import PREFIX as TRANSPOSED
from tiermoe.quant.transposed4 import transposed4_encoding
from tiermoe.quant.uneven import Uneven

__all__ = [
    "INT4_GROUPS",
    "ROW_MAJOR",
    "Encoding",
    "Field",
    "cpu_layout",
    "encoding_for",
    "encoding_named",
    "quantizer_used",
]

# bits -> the encoding of every shape, on every machine
FIXED: dict[int, Encoding] = {16: Plain(), 8: Int8()}

# bits -> the encoding of a CPU's layout and group, that of a GPU's group
PACKED: dict[int, tuple[Callable[[str, int], Encoding], Callable[[int], Encoding]]] = {
    4: (Int4, RowMajorInt4),
    2: (Int2, RowMajorInt2),
}

# Groups of 4 and 2 bits in order of choice. 64 is HQQ's published one; linear has a scale per row: the largest costs
# least.
INT4_GROUPS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("nonlinear", "hqq", "gptq", "gptq-nonlinear"), (64, 32)),
    "linear": (256, 128, 64, 32),
}

INT6_GROUP = 32
"""Columns to a scale of 6 bits: with 64 an output layer lost .09 % of perplexity, with 32 .01 %."""


def encoding_for(bits: int, out: int, in_: int, dtype: torch.dtype, layout: str, quantizer: str = "hqq") -> Encoding:
    """The encoding of a matrix of `out` rows and `in_` columns at so many bits (`FIXED`, `PACKED`, 6, 3).

    `layout` is the order of codes below 8 bits: `cpu_layout()`, or "rowmajor" for the kernels of a GPU, which take
    neither 6 nor 3 bits.

    A shape or layout that has no such format gets 8 bits, visible in the result's `bits` and `name`.
    Raises ConfigError for other bits, another machine's layout, an unknown quantizer, or a dtype that no
    kernel computes in."""
    if dtype not in COMPUTE_DTYPES:
        raise ConfigError(f"cannot compute in {dtype}: use bfloat16, float16 or float32")
    if bits in FIXED:
        return FIXED[bits]
    if bits in uneven.LEVELS:
        return _uneven_for(bits, out, in_, layout, quantizer) or _packed_for(bits, out, in_, layout, quantizer)
    if bits == Int6.bits:
        return _six_bits_for(out, in_, layout)
    known = (*FIXED, Int6.bits, *uneven.LEVELS)
    raise ConfigError(f"no {bits}-bit encoding: choose one of {', '.join(map(str, known))}")


def quantizer_used(quantizer: str, bits: int, layout: str, unit: str = "expert") -> str:
    """What makes the codes where `quantizer` is asked for. Uneven levels are for whole experts on a CPU, even ones are
    else in their place; 3 bits have no others. Neurons that are read alone have HQQ's codes in the place of GPTQ's."""
    if layout != ROW_MAJOR and unit == "expert":
        if bits in PACKED:
            return quantizer
        return GPTQ_NONLINEAR if quantizer in CALIBRATED else NONLINEAR
    even = {NONLINEAR: "hqq", GPTQ_NONLINEAR: GPTQ}.get(quantizer, quantizer)
    return "hqq" if even == GPTQ and unit != "expert" else even


def _uneven_for(bits: int, out: int, in_: int, layout: str, quantizer: str) -> Uneven | None:
    """None where the codes are to be even, or the shape fits no group."""
    if quantizer_used(quantizer, bits, layout) not in (NONLINEAR, GPTQ_NONLINEAR) or out % uneven.BLOCK_ROWS:
        return None
    _check_layout(bits, layout)
    group = next((group for group in uneven.GROUPS[bits] if in_ % group == 0), None)
    return None if group is None else Uneven(bits, layout, group)


def _packed_for(bits: int, out: int, in_: int, layout: str, quantizer: str) -> Encoding:
    if quantizer not in INT4_GROUPS:
        raise ConfigError(f"unknown quantizer {quantizer!r}: choose one of {', '.join(INT4_GROUPS)}")
    _check_layout(bits, layout)
    group = next((group for group in INT4_GROUPS[quantizer] if in_ % group == 0), None)
    if bits not in PACKED or group is None or (layout != ROW_MAJOR and out % int4_layout.ROWS):
        return FIXED[8]
    return _packed(bits, layout, group)


def _check_layout(bits: int, layout: str) -> None:
    if layout not in (ROW_MAJOR, cpu_layout()):
        raise ConfigError(f"cannot pack int{bits} for {layout!r}: there are {cpu_layout()!r} and {ROW_MAJOR!r}")


def _six_bits_for(out: int, in_: int, layout: str) -> Encoding:
    _check_layout(Int6.bits, layout)
    if in_ % INT6_GROUP or layout == ROW_MAJOR or out % int6_layout.BLOCK_ROWS:
        return FIXED[8]
    return Int6(layout, INT6_GROUP)


def _packed(bits: int, layout: str, group: int) -> Encoding:
    for_cpu, row_major = PACKED[bits]
    return row_major(group) if layout == ROW_MAJOR else for_cpu(layout, group)


def encoding_named(name: str) -> Encoding:
    """The encoding that a store names, or that weights are published in: the blocks of a GGUF file ("gguf/q4_k"), codes
    and scales of a checkpoint ("published/e2m1/e8m0/1x32").

    Raises StoreError for an unknown name and for another machine's layout of 6, 4, 3 or 2 bits."""
    if name.startswith(GGUF):
        return gguf_encoding(name)
    if name.startswith(PUBLISHED):
        return published_encoding(name)
    if name.startswith(TRANSPOSED):
        return transposed4_encoding(name)
    if name.startswith(VALUES):
        return values_encoding(name)
    if name.startswith(HALVES):
        return halves_encoding(name, encoding_named)
    fixed = next((encoding for encoding in FIXED.values() if encoding.name == name), None)
    if fixed is not None:
        return fixed
    found = re.fullmatch(r"(int[642]|nl[432])/([a-z0-9-]+)/g(32|64|128|256)", name)
    if not found or not _has_group(found[1], int(found[3])):
        raise StoreError(f"unknown encoding {name!r}: the store was written by another version; pack it again")
    kind, bits, layout, group = found[1], int(found[1][-1]), found[2], int(found[3])
    if layout not in (ROW_MAJOR, cpu_layout()):
        raise StoreError(
            f"the store is packed for the {kind} layout {layout!r}, CPUs take {cpu_layout()!r}; pack it again here"
        )
    if kind.startswith("nl"):
        return Uneven(bits, layout, group)
    return Int6(layout, group) if bits == Int6.bits else _packed(bits, layout, group)


def _has_group(kind: str, group: int) -> bool:
    """Whether an encoding of ours ("int4", "nl3") is written in such groups."""
    return kind.startswith("int") or group in uneven.GROUPS[int(kind[-1])]
