"""Format of one expert: the places of the parts in an extent on disk and in a slot in memory, and the file of a layer's
experts.

An extent is one run of bytes: every field of every part (codes, scales, biases) at a 64-byte boundary, in the order of
the layer's parts, padded to 4 KiB so that O_DIRECT reads it in one go. A slot has the same bytes, except where codes
are rearranged while loading (AWQ's and GPTQ's).

The data of a file starts at a 4 KiB boundary, extent after extent. The safetensors format allows a header padded with
spaces, and wants no holes between tensors: the gaps inside an extent are named `….padding.N` tensors, so that any
safetensors reader opens the file.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, Any, NamedTuple

import torch
import xxhash

from tiermoe.formats.encoding import FLOATS, Encoding, Field, Squares, encode_rows, rows_at_a_time
from tiermoe.formats.quantizers import Quantizer
from tiermoe.formats.registry import encoding_for, encoding_named
from tiermoe.formats.safetensors import DTYPES
from tiermoe.formats.trellis import Trellis
from tiermoe.platform import file_io
from tiermoe.types import MoeLayer, Part

PAGE = 4096
_FIELD_ALIGNMENT = 64
_READ = 4 << 20  # bytes read back at a time for the checksum

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}  # in a header

PartViews = dict[str, torch.Tensor]


class Slice(NamedTuple):
    """Some rows of an encoded matrix (out, in); of a part that is not encoded all rows, as the checkpoint has them."""

    part: Part
    first: int
    last: int  # exclusive


def align(nbytes: int, boundary: int) -> int:
    """`nbytes` rounded up to a multiple of `boundary`."""
    return -(-nbytes // boundary) * boundary


@dataclass(frozen=True, slots=True)
class PlacedField:
    """One field of one part at byte `offset`."""

    part: str
    field: Field
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Fields at their offsets; `nbytes` is a multiple of 4 KiB."""

    fields: tuple[PlacedField, ...]
    nbytes: int

    def views(self, buffer: torch.Tensor) -> dict[str, PartViews]:
        """Typed views into a uint8 buffer of at least `nbytes`: part name → field name → tensor. No copy."""
        result: dict[str, PartViews] = {}
        for placed in self.fields:
            raw = buffer[placed.offset : placed.offset + placed.field.nbytes]
            view = raw.view(placed.field.dtype).view(placed.field.shape)
            result.setdefault(placed.part, {})[placed.field.name] = view
        return result


@dataclass(frozen=True)
class SlotMatrix:
    """A packed matrix (rows, columns) in a slot, in a coding of `InC` with `group` columns to a scale. `codes`,
    `scales`, `bias`: where its fields begin, in bytes from the slot's first one, multiples of 16; None: it has no bias.
    `dtype` is that of scales, zeros and bias."""

    rows: int
    columns: int
    coding: str
    group: int
    dtype: torch.dtype
    codes: int
    scales: int
    bias: int | None = None


@dataclass(frozen=True)
class ExpertFormat:
    """The encodings of one layer's experts in one precision. Biases and 16-bit matrices are raw values of `dtype` in
    the checkpoint's orientation, in a field called 'weight'."""

    layer: MoeLayer
    bits: int
    dtype: torch.dtype  # in which kernels compute
    encodings: Mapping[str, Encoding]  # part name → encoding, of matrices below 16 bits
    part_alignment: int = _FIELD_ALIGNMENT  # bytes; every part starts at a multiple (4 KiB: a part can be read alone)
    vectors: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Biases that are stored in another dtype, and rounded to `dtype` in the slot (`round_biases`)."""
    in_page: Mapping[str, int] = field(default_factory=dict)
    """Parts that start at this byte of a page of their own, as in the file that they are read from, so that O_DIRECT
    fills the slot itself; as much room is left for each, wherever it starts."""

    @cached_property
    def stored(self) -> Layout:
        return self._layout(slot=False)

    @cached_property
    def slot(self) -> Layout:
        return self._layout(slot=True)

    @cached_property
    def widened(self) -> bool:
        """Whether a slot has other bytes than the store, biases aside."""
        return self.stored != self.slot and not self.vectors

    def bias_of(self, matrix: Part) -> str | None:
        """The name of the part that is a matrix's bias."""
        names = {f"{matrix.name}_bias", matrix.name.replace(".weight", ".bias")} - {matrix.name}
        return next((part.name for part in self.layer.parts if part.name in names), None)

    def slices(self, quantizer: Quantizer) -> list[Slice]:
        """The slices of an expert that are encoded each by itself."""
        found = []
        for part in self.layer.parts:
            encoding = self.encodings.get(part.name)
            rows = part.shape[0] if encoding is None else part.out_in[0]
            step = rows if encoding is None else rows_at_a_time(encoding, quantizer, *part.out_in)
            found += [Slice(part, first, min(first + step, rows)) for first in range(0, rows, step)]
        return found

    def encode_slice(
        self, views: Mapping[str, PartViews], of: Slice, values: torch.Tensor, quantizer: Quantizer
    ) -> Squares:
        """Writes one slice into an expert's `stored.views`. `values`: the rows that `Slice` describes."""
        fields, encoding = views[of.part.name], self.encodings.get(of.part.name)
        if encoding is None:
            fields["weight"].copy_(values)
            return 0.0, 0.0
        encoded, squares = encode_rows(encoding, quantizer, values, self.dtype)
        whole = of.last - of.first == of.part.out_in[0]  # a field of no rows, a checksum, is the whole matrix's
        for each in encoding.stored_fields(*of.part.out_in, self.dtype):
            field = fields[each.name]
            rows = field if whole else field.narrow(each.rows_at, of.first, of.last - of.first)
            rows.copy_(encoded[each.name])
        return squares

    def encode(self, tensors: Mapping[str, torch.Tensor], quantizer: Quantizer, buffer: torch.Tensor) -> Squares:
        """Writes one expert, part name → values, into `buffer` (uint8, stored.nbytes), gaps included."""
        buffer.zero_()
        views, error, size = self.stored.views(buffer), 0.0, 0.0
        for of in self.slices(quantizer):
            values = tensors[of.part.name]
            if of.part.name in self.encodings:
                matrix = values.t() if of.part.transposed else values
                values = matrix[of.first : of.last].contiguous()
            squares = self.encode_slice(views, of, values, quantizer)
            error, size = error + squares[0], size + squares[1]
        return error, size

    def widen(self, stored: torch.Tensor, slot: torch.Tensor) -> None:
        """Fills a slot (uint8) from the stored bytes of an expert where the two differ."""
        source, target = self.stored.views(stored), self.slot.views(slot)
        for part in self.layer.parts:
            encoding = self.encodings.get(part.name)
            if encoding is None or target[part.name].keys() == source[part.name].keys():
                for name, value in source[part.name].items():
                    target[part.name][name].copy_(value)
            else:
                encoding.widen(source[part.name], target[part.name])

    def round_biases(self, slot: torch.Tensor) -> None:
        """Rounds the biases of a slot (uint8) that was filled with stored bytes, in place."""
        if not self.vectors:
            return
        stored, rounded = self.stored.views(slot), self.slot.views(slot)
        for name in self.vectors:
            rounded[name]["weight"].copy_(stored[name]["weight"].to(self.dtype))

    def _layout(self, slot: bool) -> Layout:
        fields: list[PlacedField] = []
        offset = 0
        for part in self.layer.parts:
            in_page = self.in_page.get(part.name)
            offset = align(offset, self.part_alignment if in_page is None else PAGE)
            first, nbytes = offset + (in_page or 0), 0
            for field_ in self._fields(part, slot):
                fields.append(PlacedField(part.name, field_, first + nbytes))
                sizes = [self.vectors[part.name].itemsize, self.dtype.itemsize] if part.name in self.vectors else [0]
                room = math.prod(part.shape) * max(sizes)  # both dtypes begin at the same bytes
                nbytes = align(nbytes + max(field_.nbytes, room), _FIELD_ALIGNMENT)
            offset += nbytes if in_page is None else nbytes + PAGE
        return Layout(tuple(fields), align(offset, PAGE))

    def _fields(self, part: Part, slot: bool) -> tuple[Field, ...]:
        encoding = self.encodings.get(part.name)
        if encoding is None:
            stored = self.dtype if slot else self.vectors.get(part.name, self.dtype)
            return (Field("weight", stored, part.shape),)
        out, in_ = part.out_in
        return (encoding.slot_fields if slot else encoding.stored_fields)(out, in_, self.dtype)


def relative_error(squared_error: float, squared_weight: float) -> float:
    """The RMS of a difference over the RMS of the weights, from their sums of squares; 0 where all weights are 0."""
    return float((squared_error / squared_weight) ** 0.5) if squared_weight else 0.0


def expert_format(layer: MoeLayer, bits: int, dtype: torch.dtype, quantizer: str) -> ExpertFormat:
    """The format in which kernels take `layer`'s experts at `bits`.

    The last matrix, the down projection, gets 3 bits beside those that get a trellis of 2: it has a third of the
    weights and more than half of the loss (notebook/2026-11-25-two-bits.md)."""
    encodings = {}
    if bits < 16:
        matrices = [part for part in layer.parts if part.is_matrix]
        for part in matrices:
            encoding = encoding_for(bits, *part.out_in, dtype, quantizer)
            if isinstance(encoding, Trellis) and part is matrices[-1]:
                encoding = encoding_for(3, *part.out_in, dtype, quantizer)
            encodings[part.name] = encoding
    return ExpertFormat(layer, bits, dtype, encodings)


def format_from_names(
    layer: MoeLayer, bits: int, dtype: torch.dtype, names: Mapping[str, str], in_page: Mapping[str, int] | None = None
) -> ExpertFormat:
    """The format that a store records: part name → encoding name, or dtype of a bias that is stored in another than
    the slot's. in_page: `ExpertFormat`."""
    biases = {part.name for part in layer.parts if not part.is_matrix}
    encodings = {part: encoding_named(name) for part, name in names.items() if part not in biases}
    vectors = {part: FLOATS[name] for part, name in names.items() if part in biases}
    return ExpertFormat(layer, bits, dtype, encodings, vectors=vectors, in_page=in_page or {})


class ExtentWriter:
    """Appends an extent of one matrix to a file. Gaps between fields are zeros."""

    def __init__(self, handle: IO[bytes], layout: Layout) -> None:
        self._descriptor = handle.fileno()
        self.offset = os.fstat(self._descriptor).st_size
        self._end = self.offset + layout.nbytes
        os.ftruncate(self._descriptor, self._end)
        self._places = {placed.field.name: self.offset + placed.offset for placed in layout.fields}

    def write(self, field: Field, first: int, value: torch.Tensor) -> None:
        """Writes the values of `field` for rows of the matrix from `first` on; from any thread."""
        before, after = field.shape[: field.rows_at], field.shape[field.rows_at + 1 :]
        row = torch.Size(after).numel() * field.dtype.itemsize
        runs = value.contiguous().view(torch.Size(before).numel(), -1).view(torch.uint8).numpy()
        for index, run in enumerate(runs):
            at = self._places[field.name] + (index * field.shape[field.rows_at] + first) * row
            file_io.write_at(self._descriptor, run.data, at)

    def checksum(self) -> str:
        """The checksum of the extent, read back from the file."""
        digest = xxhash.xxh3_64()
        start = self.offset
        while start < self._end:
            content = file_io.read_bytes_at(self._descriptor, min(_READ, self._end - start), start)
            digest.update(content)
            start += len(content)
        return str(digest.hexdigest())


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
            table[name] = _entry(_DTYPE_NAMES[placed.field.dtype], list(placed.field.shape), start, end)
        if begin + layout.nbytes > end:
            stop = begin + layout.nbytes
            table[f"layers.{layer}.experts.{expert}.padding.{gap}"] = _entry("U8", [stop - end], end, stop)
    text = json.dumps(table, separators=(",", ":")).encode()
    length = align(8 + len(text), PAGE) - 8
    return struct.pack("<Q", length) + text.ljust(length, b" ")


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
