"""The store of a checkpoint with random weights, filled without packing it: tens of GB as fast as the drive takes them.

HQQ takes an hour of a core for 30 billion weights. Here `DRAWN` experts of each shape are drawn and packed, and every
expert of the model is one of them, stored, read and cached at a place of its own: what it costs to move and to compute
is a real model's, what it says is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from benchmarks.random_model import require_room
from tiermoe.config import Settings
from tiermoe.engine.load import resolve_for
from tiermoe.formats.encode_experts import encoded_experts
from tiermoe.formats.neurons import unit_format
from tiermoe.formats.pack import NeuronSource, forget, write_layer
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import quantizer_used
from tiermoe.formats.store import PackedLayer, Precision, Store, adding_to, precision_key
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.prepare_store import found_store, missing, open_or_create, store_root
from tiermoe.platform.machine import processors
from tiermoe.types import MoeLayer, Part, Segment

DRAWN = 5
"""Different experts of a shape. An expert differs from its neighbours and from that of its number a layer before."""


@dataclass(frozen=True)
class DrawnExperts:
    """Experts of random weights (`source.ExpertSource`). unwritten: columns of the hidden states that none adds to, the
    first ones."""

    layers: list[MoeLayer]
    unwritten: int = 0

    def read(self, layer: int, expert: int) -> Mapping[str, torch.Tensor]:
        generator, found = torch.Generator().manual_seed(expert), dict[str, torch.Tensor]()
        for part in self.layers[layer].parts:
            deviation = part.out_in[1] ** -0.5 if part.is_matrix else 0.1
            found[part.name] = (torch.randn(part.shape, generator=generator) * deviation).bfloat16()
        found[part.name][: self.unwritten] = 0
        return found

    def in_place(self, layer: int, expert: int) -> list[Segment] | None:
        return None


def fill(blueprint: Blueprint, asked: Settings, unwritten: int = 0, kept: tuple[str, ...] = ()) -> Store:
    """The checkpoint's store, with the precisions of experts that the settings ask for and without others, but `kept`.
    unwritten: `DrawnExperts`. PackError if the drive has too little room; ConfigError and ProfileError as
    `resolve_for`."""
    resolved = resolve_for(blueprint, asked)
    store = open_or_create(blueprint, store_root(blueprint, asked.store), found=found_store(blueprint, asked.store))
    quantizer, unit = resolved.settings.quantizer_used, resolved.composition.unit
    wanted = {precision_key(bits, quantizer, unit) for bits in resolved.precisions}
    for key in store.precisions.keys() - wanted - {*kept}:
        forget(store, key, None)
    for bits in missing(store, blueprint, resolved)[0]:
        _add(store, bits, quantizer, unit, unwritten)
    return store


def _add(store: Store, bits: int, quantizer: str, unit: str, unwritten: int) -> None:
    """Adds a precision of random experts to the store."""
    key = precision_key(bits, quantizer, unit)
    quantizer = quantizer_used(quantizer, bits, unit)
    formats = [unit_format(unit, layer, bits, store.dtype, quantizer) for layer in store.layers]
    forget(store, key, None)  # what an interrupted run left
    require_room(store.root, sum(form.stored.nbytes * form.layer.experts for form in formats))
    whole = DrawnExperts(store.layers, unwritten)
    source = NeuronSource(whole) if unit == "neuron" else whole
    drawn = dict[tuple[Part, ...], list[tuple[memoryview, float]]]()
    layers = list[PackedLayer]()
    with adding_to(store):
        for index, form in enumerate(formats):
            if (shape := form.layer.parts) not in drawn:
                few = replace(form, layer=replace(form.layer, experts=DRAWN))
                made = encoded_experts(few, QUANTIZERS[quantizer], source, index, processors())
                drawn[shape] = [(memoryview(bytes(content)), error) for content, error in made]
            each = (drawn[shape][(index + expert) % DRAWN] for expert in range(form.layer.experts))
            layers.append(write_layer(store.root, key, index, form, each))
        store.precisions[key] = Precision(bits, quantizer if bits < 8 else "", False, layers)
        store.save()
