"""Registry of encodings: all by name, and the encoding of a matrix by bits and shape."""

import re
from collections.abc import Callable
from pkgutil import resolve_name

import torch

from tiermoe.config import BITS, BY_SHAPE, CALIBRATED
from tiermoe.errors import ConfigError, StoreError
from tiermoe.formats import int4, nonuniform, trellis
from tiermoe.formats.checkpoint_quant import PREFIX as CHECKPOINT
from tiermoe.formats.checkpoint_quant import TRANSPOSED, checkpoint_quant_encoding, transposed4_encoding
from tiermoe.formats.encoding import BLOCK_ROWS, FLOATS, ORDER, Encoding
from tiermoe.formats.gguf_types import PREFIX as GGUF
from tiermoe.formats.gguf_types import gguf_encoding
from tiermoe.formats.int4 import Int2, Int4
from tiermoe.formats.int6 import Int6
from tiermoe.formats.int8 import Int8
from tiermoe.formats.nonuniform import NonUniform
from tiermoe.formats.plain import HALVES, VALUES, halves_encoding, values_encoding
from tiermoe.formats.quantizers import GPTQ, GPTQ_NONLINEAR, HQQ_DOUBLE, NONLINEAR
from tiermoe.formats.trellis import Trellis

_PACKED: dict[int, type[Int4]] = {4: Int4, 2: Int2}
"""Bits → the encoding with uniform levels."""

INT4_GROUPS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("nonlinear", "hqq", "hqq-double", "gptq", "gptq-nonlinear"), (64, 32)),
    "linear": (256, 128, 64, 32),
}
"""Quantizer → groups of 4 and 2 bits in order of choice. 64 is HQQ's published one; linear has a scale for each row, so
that the largest group costs least."""

INT6_GROUP = 32
"""Columns to a scale of 6 bits: with 64 an output layer lost .09 % of perplexity, with 32 .01 %."""


def encoding_for(bits: int, out: int, in_: int, dtype: torch.dtype, quantizer: str = "hqq") -> Encoding:
    """The encoding of a matrix of `out` rows and `in_` columns at 16, 8, 6, 4, 3 or 2 bits.

    A shape that has no such format gets 8 bits, visible in the result's `bits` and `name`. Raises ConfigError for other
    bits, an unknown quantizer, or a dtype that no kernel computes in."""
    if dtype not in FLOATS.values():
        raise ConfigError(f"cannot compute in {dtype}: use bfloat16, float16 or float32")
    if BITS.get(bits, BY_SHAPE) != BY_SHAPE:
        return _of_every_shape(BITS[bits])
    if bits in nonuniform.LEVELS:
        return _nonuniform_for(bits, out, in_, quantizer) or _packed_for(bits, out, in_, quantizer)
    if bits == Int6.bits:
        return Int6(INT6_GROUP) if in_ % INT6_GROUP == 0 and out % BLOCK_ROWS == 0 else Int8()
    known = sorted({*BITS, Int6.bits}, reverse=True)
    raise ConfigError(f"no {bits}-bit encoding: choose one of {', '.join(map(str, known))}")


def _of_every_shape(place: str) -> Encoding:
    encoding: Encoding = resolve_name(place)()
    return encoding


def quantizer_used(quantizer: str, bits: int, unit: str = "expert") -> str:
    """The quantizer that makes the codes under the option `quantizer`. Non-uniform levels are for whole experts; the
    neuron unit has uniform ones. 3 bits have non-uniform levels alone. Neurons that are read alone have HQQ's codes in
    the place of GPTQ's. The 4 bits of the neuron unit alone have scales with a second level."""
    if quantizer == HQQ_DOUBLE and not (unit == "neuron" and bits == 4):
        quantizer = "hqq"
    if unit != "expert":
        return "hqq" if quantizer in (NONLINEAR, GPTQ_NONLINEAR, GPTQ) else quantizer
    if bits in _PACKED:
        return quantizer
    return GPTQ_NONLINEAR if quantizer in CALIBRATED else NONLINEAR


def _nonuniform_for(bits: int, out: int, in_: int, quantizer: str) -> NonUniform | Trellis | None:
    """None where the levels are to be uniform, or the shape fits no group."""
    used = quantizer_used(quantizer, bits)
    if used not in (NONLINEAR, GPTQ_NONLINEAR) or out % BLOCK_ROWS:
        return None
    if used == GPTQ_NONLINEAR and bits == Trellis.bits:
        long = next((group for group in trellis.GROUPS if in_ % group == 0), None)
        if long is not None:
            return Trellis(long)
    group = next((group for group in nonuniform.GROUPS[bits] if in_ % group == 0), None)
    return None if group is None else NonUniform(bits, group)


def _packed_for(bits: int, out: int, in_: int, quantizer: str) -> Encoding:
    if quantizer not in INT4_GROUPS:
        raise ConfigError(f"unknown quantizer {quantizer!r}: choose one of {', '.join(INT4_GROUPS)}")
    group = next((group for group in INT4_GROUPS[quantizer] if in_ % group == 0), None)
    if bits not in _PACKED or group is None or out % int4.ROWS:
        return Int8()
    return _PACKED[bits](group)


def encoding_named(name: str) -> Encoding:
    """The encoding that a store names, or in which weights are published: blocks of a GGUF file ("gguf/q4_k"), codes
    and scales of a checkpoint ("published/e2m1/e8m0/1x32").

    Raises StoreError for an unknown name and for codes in another order, as older versions wrote them."""
    for prefix, read in _PUBLISHED.items():
        if name.startswith(prefix):
            return read(name)
    for place in BITS.values():
        if place != BY_SHAPE and (encoding := _of_every_shape(place)).name == name:
            return encoding
    if name.startswith("int2/"):
        raise StoreError(
            f"2 bits as {name!r} were written by an older version and are read no more: "
            "'tiermoe pack MODEL --bits 2 --force' packs them again"
        )
    found = re.fullmatch(r"(int[64]|u2|nl[432]|tcq2)/([a-z0-9-]+)/g(32|64|128|256)", name)
    if not found or not _has_group(found[1], int(found[3])):
        raise StoreError(f"unknown encoding {name!r}: the store was written by another version; pack it again")
    kind, bits, order, group = found[1], int(found[1][-1]), found[2], int(found[3])
    if order != ORDER:
        raise StoreError(
            f"codes as {name!r} were written by an older version and are read no more: 'tiermoe pack MODEL --force' "
            "packs them again"
        )
    if kind.startswith("nl"):
        return NonUniform(bits, group)
    if kind == "tcq2":
        return Trellis(group)
    return Int6(group) if bits == Int6.bits else _PACKED[bits](group)


def _has_group(kind: str, group: int) -> bool:
    """Whether an encoding of ours ("int4", "nl3") is written in such groups."""
    if kind == "tcq2":
        return group in trellis.GROUPS
    return not kind.startswith("nl") or group in nonuniform.GROUPS[int(kind[-1])]


_PUBLISHED: dict[str, Callable[[str], Encoding]] = {
    GGUF: gguf_encoding,
    CHECKPOINT: checkpoint_quant_encoding,
    TRANSPOSED: transposed4_encoding,
    VALUES: values_encoding,
    HALVES: lambda name: halves_encoding(name, encoding_named),
}
"""How names of encodings begin in which weights are published → the function that reads the name."""
