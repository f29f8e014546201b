"""The neuron unit's format of an expert: W1 in one piece, then one record per neuron (CORM, section 5).

An expert `W2 (act(W1 x) * W3 x)` with I neurons over a hidden size of H becomes two parts, each at a 4 KiB boundary:
'gate', W1 (I, H) in the encoding of this machine's kernels, and 'neurons' (I, 2 H), row j of W3 beside column j of W2.
All else (extents, files, packing, resuming) is that of whole experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from tiermoe.errors import ModelError
from tiermoe.quant.neuron_records import Records, Sealed, records_for, records_named
from tiermoe.quant.registry import encoding_for, encoding_named, quantizer_used
from tiermoe.store.layout import PAGE, ExpertFormat, expert_format
from tiermoe.store.source import ExpertSource
from tiermoe.types import MoeLayer, Part, Segment

GATE, NEURONS = "gate", "neurons"
_SUFFIX = "-neuron"
_SEALED = "sealed/"


def neuron_key(key: str) -> str:
    """The name in a store of a precision of whole experts' counterpart in the neuron unit: '4-hqq-neuron'."""
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


def neuron_format(layer: MoeLayer, bits: int, dtype: torch.dtype, machine: str, quantizer: str) -> ExpertFormat:
    """The format of `layer`'s experts (with their own parts) in the neuron unit, 4 or 2 bits. ModelError as
    `neuron_layer`; ConfigError for other bits and for a hidden size that is no multiple of 64."""
    layer = neuron_layer(layer)
    neurons, hidden = layer.parts[0].shape
    quantizer = quantizer_used(quantizer, bits, machine, "neuron")
    gate = Sealed(encoding_for(bits, neurons, hidden, dtype, machine, quantizer))
    return ExpertFormat(layer, bits, dtype, {GATE: gate, NEURONS: records_for(bits, hidden)}, PAGE)


def neuron_format_from_names(layer: MoeLayer, bits: int, dtype: torch.dtype, names: Mapping[str, str]) -> ExpertFormat:
    """The format that a store records: part name → encoding name; `layer` as the store has it."""
    gate = Sealed(encoding_named(names[GATE].removeprefix(_SEALED)))
    return ExpertFormat(neuron_layer(layer), bits, dtype, {GATE: gate, NEURONS: records_named(names[NEURONS])}, PAGE)


class RecordPlace(NamedTuple):
    """Where the records of an expert begin, in its extent and in its slot, both at pages. `neurons`: how many there
    are; `check_at`: where in a record its checksum begins."""

    stored_at: int
    slot_at: int
    neurons: int
    record_bytes: int
    check_at: int


def record_place(form: ExpertFormat) -> RecordPlace:
    """Where a format of the neuron unit has its records."""
    stored_at, slot_at = (
        next(placed.offset for placed in layout.fields if placed.part == NEURONS) for layout in (form.stored, form.slot)
    )
    records = form.encodings[NEURONS]
    assert isinstance(records, Records)
    neurons, hidden = form.layer.parts[0].shape
    width = records.record_bytes(hidden, form.dtype)
    return RecordPlace(stored_at, slot_at, neurons, width, records.check_at(hidden, form.dtype))


class NeuronSource:
    """Hands a checkpoint's experts to packing as the parts of the neuron unit (`store.source.ExpertSource`)."""

    def __init__(self, source: ExpertSource) -> None:
        self.layers = [neuron_layer(layer) for layer in source.layers]
        self._source = source
        self._parts = [tuple(part.name for part in layer.parts) for layer in source.layers]

    def read(self, layer: int, expert: int) -> Mapping[str, torch.Tensor]:
        tensors = self._source.read(layer, expert)
        gate_up, down = (tensors[name] for name in self._parts[layer])
        gate, up = gate_up.chunk(2)
        return {GATE: gate, NEURONS: torch.cat((up, down.t()), dim=1)}

    def in_place(self, layer: int, expert: int) -> list[Segment] | None:
        return None


def _why_not(layer: MoeLayer) -> str:
    """What keeps the experts of `layer` from the neuron unit; empty: nothing."""
    if any(not part.is_matrix for part in layer.parts):
        return "its experts have biases"
    if len(layer.parts) != 2 or any(part.transposed for part in layer.parts):
        return "its experts are not a gate-and-up matrix and a down matrix, stored as (out, in)"
    (first, hidden), (out, neurons) = (part.shape for part in layer.parts)
    if out != hidden or first != 2 * neurons:
        return "its experts have no gate, so that no neuron is known to be inactive before it is computed"
    return ""


def unit_format(
    unit: str, layer: MoeLayer, bits: int, dtype: torch.dtype, machine: str, quantizer: str
) -> ExpertFormat:
    """The format of a layer's experts in a unit. ModelError or ConfigError where the neuron unit cannot take them."""
    make = neuron_format if unit == "neuron" else expert_format
    return make(layer, bits, dtype, machine, quantizer)
