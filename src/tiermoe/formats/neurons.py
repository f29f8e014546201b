"""Experts in the neuron unit: W1 in one piece, then one record per neuron, so that a neuron is read and decoded alone.

An expert `W2 (act(W1 x) * W3 x)` with I neurons over a hidden size of H becomes two parts, each at a 4 KiB boundary:
'gate', W1 (I, H) in the encoding of this machine's kernels, and 'neurons' (I, 2 H), row j of W3 beside column j of W2.
CORM (section 5) packs so that each neuron's storage is independent: here a record is a run of bytes of its own, all of
one size. The parts are sealed: each has a checksum of its own, so that one is verified without the rest. All else
(extents, files, packing, resuming) is that of whole experts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
import xxhash
from torch import Tensor

from tiermoe.errors import ConfigError, ModelError, StoreError
from tiermoe.formats.encoding import Encoding, Field, SameInSlot, scratch
from tiermoe.formats.expert_format import PAGE, ExpertFormat, expert_format
from tiermoe.formats.quantizers import HQQ_DOUBLE, Quantizer, nearest_codes, uniform_codes, uniform_parameters
from tiermoe.formats.registry import encoding_for, encoding_named, quantizer_used
from tiermoe.types import MoeLayer, Part

GATE, NEURONS = "gate", "neurons"
CHECK_BYTES = 8  # of a checksum

_ALIGNMENT = 16
_SUFFIX = "-neuron"
_SEALED = "sealed/"


@dataclass(frozen=True)
class Sealed(SameInSlot):
    """Another encoding with a checksum of its fields, so that a part can be verified without the rest of the expert.

    Fields: those of `inner`, whose slot holds them as they are stored, and `check` uint8 (8,), XXH3-64 of their bytes
    one after the other."""

    inner: Encoding

    @property
    def name(self) -> str:
        return f"{_SEALED}{self.inner.name}"

    @property
    def bits(self) -> int:
        return self.inner.bits

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (*self.inner.stored_fields(out, in_, dtype), Field("check", torch.uint8, (CHECK_BYTES,)))

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        fields = self.inner.encode(weight, quantizer, dtype)
        rows, columns = weight.shape
        order = [field.name for field in self.inner.stored_fields(rows, columns, dtype)]
        content = {name: fields[name].contiguous() for name in order}
        return {**fields, "check": torch.frombuffer(bytearray(_seal(content)), dtype=torch.uint8)}

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        return self.inner.decode(slot, out, in_, dtype)

    @staticmethod
    def holds(stored: Mapping[str, Tensor]) -> bool:
        """Whether the stored fields, in their order, match their checksum."""
        content = {name: value for name, value in stored.items() if name != "check"}
        return _seal(content) == bytes(stored["check"].numpy())


def _seal(fields: Mapping[str, Tensor]) -> bytes:
    digest = xxhash.xxh3_64()
    for value in fields.values():
        digest.update(value.view(torch.uint8).numpy().data)
    result: bytes = digest.digest()
    return result


@dataclass(frozen=True)
class Records(SameInSlot):
    """Records of N neurons: a matrix with 2 H columns, whose row j is [row j of W3 | column j of W2], two halves of H
    weights. Field: `records` uint8 (N, record_bytes).

    A record: codes of both halves, parameters of both, XXH3-64 of all of that seeded with the neuron's index, zeros up
    to a multiple of 16 bytes. A half's H codes fill `strips` equal strips: byte j holds columns j, j + H / strips, …,
    the first in the lowest bits, so that a strip is unpacked by a shift and a mask of the whole half. w = (code -
    middle) * scale + zero, with a scale and a zero for every `group` columns."""

    group: int
    two_level: ClassVar[bool] = False
    bits: ClassVar[int]
    middle: ClassVar[int]

    @property
    def name(self) -> str:
        return f"records{self.bits}/g{self.group}"

    @property
    def strips(self) -> int:
        return 8 // self.bits

    def record_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Bytes of a record with halves of `width` weights."""
        return -(-(self.check_at(width, dtype) + CHECK_BYTES) // _ALIGNMENT) * _ALIGNMENT

    def check_at(self, width: int, dtype: torch.dtype) -> int:
        """The byte of a record at which the checksum begins."""
        return 2 * (width // self.strips + self._parameter_bytes(width, dtype))

    def stored_fields(self, out: int, in_: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (Field("records", torch.uint8, (out, self.record_bytes(in_ // 2, dtype))),)

    def encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, Tensor]:
        neurons, width = weight.shape[0], weight.shape[1] // 2
        codes, parameters = self._encode(weight.reshape(2 * neurons, width), quantizer, dtype)
        end = self.check_at(width, dtype)
        records = torch.zeros(neurons, self.record_bytes(width, dtype), dtype=torch.uint8)
        packed = self._pack(codes).view(neurons, -1)
        records[:, : packed.shape[1]] = packed
        records[:, packed.shape[1] : end] = parameters.view(neurons, -1)
        for neuron, record in enumerate(records.numpy()):
            record[end : end + CHECK_BYTES] = bytearray(checksum(record[:end], neuron))
        return {"records": records}

    def decode(self, slot: Mapping[str, Tensor], out: int, in_: int, dtype: torch.dtype) -> Tensor:
        records, width = slot["records"], in_ // 2
        weight = torch.empty(out, 2, width, dtype=dtype, device=records.device)
        for half in (0, 1):
            weight[:, half] = self.decode_half(records, half, width, dtype)
        return weight.view(out, in_)

    def decode_half(self, records: Tensor, half: int, width: int, dtype: torch.dtype) -> Tensor:
        """W3's rows (half 0) or W2's columns (half 1) of `records` (n, record_bytes), as (n, width) in `dtype`,
        computed in float32 and rounded once."""
        scale, zero = self.parameters(records, half, width, dtype)
        weight = torch.empty(len(records), width, dtype=dtype, device=records.device)
        strips = weight.view(len(records), self.strips, -1, self.group)
        groups = strips.shape[2]
        for strip, codes in enumerate(self.codes(records, half, width)):
            part = slice(strip * groups, (strip + 1) * groups)
            values = codes.view(-1, groups, self.group).float()
            strips[:, strip] = values.mul_(scale[:, part, None]).add_(zero[:, part, None])
        return weight.view(len(records), width)

    def codes(self, records: Tensor, half: int, width: int) -> Tensor:
        """The centred codes of one half of `records` (n, record_bytes): int8 (strips, n, width / strips), valid until
        the calling thread asks for the next ones."""
        size = width // self.strips
        packed = records[:, half * size : (half + 1) * size]
        shape, on_cpu = (self.strips, len(records), size), records.device.type == "cpu"
        codes = scratch.take("codes", shape, torch.uint8) if on_cpu else records.new_empty(shape)
        for strip, target in enumerate(codes):
            torch.bitwise_right_shift(packed, strip * self.bits, out=target)
            target.bitwise_and_((1 << self.bits) - 1)
        centred = codes.view(torch.int8)
        return centred.sub_(self.middle) if self.middle else centred

    @abstractmethod
    def parameters(self, records: Tensor, half: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Scales and zeros of one half of `records`, float32 (n, width / group)."""

    @abstractmethod
    def _parameter_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Bytes of the parameters of one half."""

    @abstractmethod
    def _encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Codes uint8 (n, width) and parameters uint8 (n, bytes) of halves (n, width)."""

    def _parameters_at(self, half: int, width: int, dtype: torch.dtype) -> int:
        return 2 * width // self.strips + half * self._parameter_bytes(width, dtype)

    def _pack(self, codes: Tensor) -> Tensor:
        strips = codes.view(len(codes), self.strips, -1).unbind(1)
        packed = torch.zeros_like(strips[0])
        for strip, values in enumerate(strips):
            packed |= values << (strip * self.bits)
        return packed


@dataclass(frozen=True)
class Records4(Records):
    """4 bits, codes 0..15 about 8. Parameters of a half: `scale` and `zero` (H / group) in the compute dtype."""

    bits: ClassVar[int] = 4
    middle: ClassVar[int] = 8

    def parameters(self, records: Tensor, half: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        at, size = self._parameters_at(half, width, dtype), width // self.group * dtype.itemsize
        scale, zero = records[:, at : at + size], records[:, at + size : at + 2 * size]
        return scale.view(dtype).float(), zero.view(dtype).float()

    def _parameter_bytes(self, width: int, dtype: torch.dtype) -> int:
        return 2 * (width // self.group) * dtype.itemsize

    def _encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scale, zero = uniform_parameters(weight, quantizer, self.bits, self.group, dtype)
        return uniform_codes(weight, scale, zero, self.bits), torch.cat((scale, zero), dim=1).view(torch.uint8)


@dataclass(frozen=True)
class TwoLevelRecords(Records):
    """Scales and zeros are quantised again, to 8 bits. Parameters of a half: `unit` (1) in the compute dtype, `step`
    uint8 and `offset` int8 (H / group): scale = unit * step, zero = unit * offset.

    CORM (section 7) gives up to 256 scales of 4 bits, 128 of 2 bits, such a second scale, as HQQ's `quant_scale` and
    the double quantisation of QLoRA do. Here a half has its own, so that a neuron needs no other's."""

    two_level: ClassVar[bool] = True

    def parameters(self, records: Tensor, half: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        at, groups = self._parameters_at(half, width, dtype), width // self.group
        unit = records[:, at : at + dtype.itemsize].view(dtype).float()
        at += dtype.itemsize
        step = records[:, at : at + groups]
        offset = records[:, at + groups : at + 2 * groups].view(torch.int8)
        return unit * step, unit * offset

    def _parameter_bytes(self, width: int, dtype: torch.dtype) -> int:
        return 2 * (width // self.group) + dtype.itemsize

    def _encode(self, weight: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scale, zero = quantizer.parameters(weight, self.bits, self.group)
        zero += self.middle * scale
        # the largest step fits 8 bits without a sign, the largest offset 8 bits with one
        largest = torch.maximum(scale / 255, zero.abs() / 127)
        unit = largest.amax(dim=1, keepdim=True).to(dtype)
        exact = torch.where(unit == 0, torch.inf, unit.float())
        step = (scale / exact).round_().clamp_(1, 255)
        offset = (zero / exact).round_().clamp_(-128, 127)
        low, high = -self.middle, (1 << self.bits) - 1 - self.middle
        codes = nearest_codes(weight, step * unit.float(), offset * unit.float(), low, high, torch.int8)
        fields = (unit.view(torch.uint8), step.to(torch.uint8), offset.to(torch.int8).view(torch.uint8))
        return codes.add_(self.middle).view(torch.uint8), torch.cat(fields, dim=1)


@dataclass(frozen=True)
class TwoLevelRecords4(TwoLevelRecords):
    """4 bits, codes 0..15 about 8; 4.25 bits a weight in all."""

    bits: ClassVar[int] = 4
    middle: ClassVar[int] = 8

    @property
    def name(self) -> str:
        return f"{super().name}/two-level"


@dataclass(frozen=True)
class Records2(TwoLevelRecords):
    """2 bits, codes 0..3; 3 bits a weight in all."""

    bits: ClassVar[int] = 2
    middle: ClassVar[int] = 0


def checksum(record: memoryview, neuron: int) -> bytes:
    """The checksum, 8 bytes, of the codes and parameters of neuron `neuron`."""
    digest: bytes = xxhash.xxh3_64_digest(record, seed=neuron)
    return digest


def holds(record: memoryview, neuron: int, check_at: int) -> bool:
    """Whether neuron `neuron`'s record, whose checksum begins at `check_at`, matches it."""
    return checksum(record[:check_at], neuron) == record[check_at : check_at + CHECK_BYTES]


_ALL: tuple[Records, ...] = (
    Records4(64), Records4(32), TwoLevelRecords4(64), TwoLevelRecords4(32), Records2(16),
)  # fmt: skip


def records_for(bits: int, width: int, quantizer: str) -> Records:
    """The encoding of neurons with halves of `width` weights. ConfigError where there is none."""
    if bits not in (4, 2):
        raise ConfigError(f"neurons are packed at 4 or 2 bits, not at {bits}; use --bits 4, or the unit 'expert'")
    two_level = bits == 2 or quantizer == HQQ_DOUBLE
    for records in _ALL:
        fits = width % (records.strips * records.group) == 0
        if fits and (records.bits, records.two_level) == (bits, two_level):
            return records
    raise ConfigError(
        f"neurons of a hidden size of {width} cannot be packed at {bits} bits: it is not a multiple of 64; "
        f"use the unit 'expert'"
    )


def records_named(name: str) -> Records:
    """The encoding that a store names. StoreError for an unknown name."""
    for records in _ALL:
        if records.name == name:
            return records
    raise StoreError(f"unknown encoding {name!r}: the store was written by another version; pack it again")


def neuron_key(key: str) -> str:
    """The name in a store of a precision in the neuron unit, from that of whole experts: '4-hqq-neuron'."""
    return key + _SUFFIX


def is_neuron_key(key: str) -> bool:
    return key.endswith(_SUFFIX)


def neuron_layer(layer: MoeLayer) -> MoeLayer:
    """The layer with the parts 'gate' (I, H) and 'neurons' (I, 2 H). ModelError where its experts are not gated, or
    hold more than a gate, an up and a down matrix."""
    reason = _why_not(layer)
    if reason:
        raise ModelError(f"the neuron unit cannot take {layer.name}: {reason}; use the unit 'expert'")
    hidden, neurons = layer.parts[1].shape
    return replace(layer, parts=(Part(GATE, (neurons, hidden)), Part(NEURONS, (neurons, 2 * hidden))))


def neuron_format(layer: MoeLayer, bits: int, dtype: torch.dtype, quantizer: str) -> ExpertFormat:
    """The format of `layer`'s experts (with their own parts) in the neuron unit, 4 or 2 bits. ModelError as
    `neuron_layer`; ConfigError for other bits and for a hidden size that is no multiple of 64."""
    layer = neuron_layer(layer)
    neurons, hidden = layer.parts[0].shape
    quantizer = quantizer_used(quantizer, bits, "neuron")
    gate = Sealed(encoding_for(bits, neurons, hidden, dtype, quantizer))
    return ExpertFormat(layer, bits, dtype, {GATE: gate, NEURONS: records_for(bits, hidden, quantizer)}, PAGE)


def neuron_format_from_names(layer: MoeLayer, bits: int, dtype: torch.dtype, names: Mapping[str, str]) -> ExpertFormat:
    """The format that a store records: part name → encoding name. `layer`: as the store has it, of whole experts."""
    gate = Sealed(encoding_named(names[GATE].removeprefix(_SEALED)))
    return ExpertFormat(neuron_layer(layer), bits, dtype, {GATE: gate, NEURONS: records_named(names[NEURONS])}, PAGE)


class RecordPlace(NamedTuple):
    """Where the records of an expert are, in its extent and in its slot."""

    stored_at: int  # byte of the extent at which they begin, a page
    slot_at: int  # byte of the slot at which they begin, a page
    neurons: int  # how many there are
    record_bytes: int
    check_at: int  # byte of a record at which its checksum begins


def record_place(form: ExpertFormat) -> RecordPlace:
    """Where the records of a format of the neuron unit are."""
    stored_at, slot_at = (
        next(placed.offset for placed in layout.fields if placed.part == NEURONS) for layout in (form.stored, form.slot)
    )
    records = form.encodings[NEURONS]
    assert isinstance(records, Records)
    neurons, hidden = form.layer.parts[0].shape
    width = records.record_bytes(hidden, form.dtype)
    return RecordPlace(stored_at, slot_at, neurons, width, records.check_at(hidden, form.dtype))


def unit_format(unit: str, layer: MoeLayer, bits: int, dtype: torch.dtype, quantizer: str) -> ExpertFormat:
    """The format of a layer's experts in a unit. ModelError or ConfigError where the neuron unit cannot take them."""
    make = neuron_format if unit == "neuron" else expert_format
    return make(layer, bits, dtype, quantizer)


def _why_not(layer: MoeLayer) -> str:
    """The reason why the neuron unit cannot take the experts of `layer`; empty where it can."""
    if any(not part.is_matrix for part in layer.parts):
        return "its experts have biases"
    if len(layer.parts) != 2 or any(part.transposed for part in layer.parts):
        return "its experts are not a gate-and-up matrix and a down matrix, stored as (out, in)"
    (first, hidden), (out, neurons) = (part.shape for part in layer.parts)
    if out != hidden or first != 2 * neurons:
        return "its experts have no gate, so that no neuron is known to be inactive before it is computed"
    return ""
