"""Writes experts into a safetensors file whose data starts at a 4 KiB boundary, extent after extent.

The format allows a header padded with spaces, and wants no holes between tensors: the gaps inside an extent are named
`….padding.N` tensors, so any safetensors reader opens the file.
"""

from __future__ import annotations

import json
import struct
from typing import IO, Any

import torch

from tiermoe.store.layout import PAGE, Layout, align

_NAMES = {
    torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
}  # fmt: skip


def header_of(layout: Layout, layer: int, experts: int) -> bytes:
    """The file's first bytes (length prefix, JSON, spaces), a multiple of 4 KiB long."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt", "tiermoe": "expert-store"}}
    for expert in range(experts):
        begin, gap = expert * layout.nbytes, 0
        end = begin
        for placed in layout.fields:
            start = begin + placed.offset
            if start > end:
                table[f"layers.{layer}.experts.{expert}.padding.{gap}"] = _entry("U8", [start - end], end, start)
                gap += 1
            end = start + placed.field.nbytes
            name = f"layers.{layer}.experts.{expert}.{placed.part}.{placed.field.name}"
            table[name] = _entry(_NAMES[placed.field.dtype], list(placed.field.shape), start, end)
        if begin + layout.nbytes > end:
            stop = begin + layout.nbytes
            table[f"layers.{layer}.experts.{expert}.padding.{gap}"] = _entry("U8", [stop - end], end, stop)
    text = json.dumps(table, separators=(",", ":")).encode()
    length = align(8 + len(text), PAGE) - 8
    return struct.pack("<Q", length) + text.ljust(length, b" ")


def write_header(handle: IO[bytes], layout: Layout, layer: int, experts: int) -> int:
    """Writes the header and returns the offset of expert 0."""
    return handle.write(header_of(layout, layer, experts))


def file_name(key: str, layer: int | str) -> str:
    """The file of one layer's experts in precision `key`; a pattern of such names where either is '*'."""
    return f"experts-{key}-layer{layer:0>3}.safetensors" if layer != "*" else f"experts-{key}-layer*.safetensors"


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
