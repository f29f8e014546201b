"""What is held while the store is packed, while the model is loaded and while it runs: each part from its owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tiermoe.config import MIB, Settings
from tiermoe.kernels import machine_layout
from tiermoe.memory.activations import decoder_needs, expanding_needs
from tiermoe.memory.memory_plan import total
from tiermoe.model.blueprint import Blueprint
from tiermoe.model.dense import dense_bytes
from tiermoe.model.dense_weights import loading_needs
from tiermoe.model.prepare_store import packing_needs
from tiermoe.store.layout import ExpertFormat
from tiermoe.store.store import Store
from tiermoe.systems.resolved import Resolved
from tiermoe.tiers.disk import LANES, staging_bytes
from tiermoe.types import Need, Phase, Use, Workload

_FIRST_USE = 46 * MIB  # library code and heap that the first forward pass brings in: 43 MiB measured


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the needs follow from. process: bytes that the process holds already. store: as it was found, or none. use:
    of the engine."""

    blueprint: Blueprint
    resolved: Resolved
    formats: Mapping[int, Sequence[ExpertFormat]]
    context: int
    device: str
    process: int
    store: Store | None
    use: Use

    @property
    def settings(self) -> Settings:
        """Of the preset that was made ready."""
        return self.resolved.settings

    @property
    def every_format(self) -> list[ExpertFormat]:
        """Of all layers in all precisions."""
        return [form for forms in self.formats.values() for form in forms]


def formats_of(blueprint: Blueprint, resolved: Resolved, layout: str) -> dict[int, list[ExpertFormat]]:
    """Precision → the format of each layer's experts."""
    unit, quantizer = resolved.composition.unit, resolved.settings.quantizer_used
    return {bits: blueprint.expert_formats(bits, unit, layout, quantizer) for bits in resolved.precisions}


def while_running(model: Inputs) -> list[Need]:
    """What is held while the model runs, beside the slots of experts: each from its owner."""
    blueprint, settings, formats = model.blueprint, model.settings, model.every_format
    load = Workload(
        model.context, settings.chunk, settings.batch, blueprint.dtype.itemsize,
        settings.threads or torch.get_num_threads(), settings.kv_bits, model.use,
    )  # fmt: skip
    held = 0
    if model.resolved.composition.store == "memory":
        held = sum(form.stored.nbytes * form.layer.experts for form in formats)
    dense = dense_bytes(blueprint, settings.dense_bits_used, machine_layout(model.device))
    return [
        Need("interpreter", model.process, Phase.RUNNING, "measured in this process"),
        Need("interpreter", _FIRST_USE, Phase.RUNNING, "what the first step brings in"),
        Need("dense", dense, Phase.RUNNING, "weights"),
        *expanding_needs(blueprint, settings, model.device),
        *decoder_needs(blueprint, formats, settings, load, model.device),
        Need("staging", staging_bytes(formats, settings.lanes or LANES), Phase.RUNNING, "reading lanes"),
        Need("staging", held, Phase.RUNNING, "the store in memory"),
        *([Need("requests", model.use.requests, Phase.RUNNING, "those in flight")] if model.use.requests else []),
    ]


def while_loading(model: Inputs, on_disk: int) -> list[Need]:
    """What is held while the dense weights are loaded, less the `on_disk` bytes that stay there; for a GPU too: they
    come through main memory."""
    dense = dense_bytes(model.blueprint, model.settings.dense_bits_used, machine_layout(model.device)) - on_disk
    process = Need("interpreter", model.process, Phase.LOADING)
    return [process, *loading_needs(model.blueprint, dense, on_disk > 0)]


def while_packing(model: Inputs, budget: int) -> tuple[int, list[Need]]:
    """By how many workers the store is packed, and their needs; none where the store lacks nothing. One more than torch
    has threads, since one of them reads, or as many as the budget allows."""
    layout = machine_layout(model.device)
    process = Need("interpreter", model.process + _FIRST_USE, Phase.PACKING)
    for workers in range((model.settings.threads or torch.get_num_threads()) + 1, 0, -1):
        needs = packing_needs(model.store, model.blueprint, model.resolved, layout, workers)
        if not needs:
            return workers, []
        needs = [process, *needs]
        if total(needs, Phase.PACKING) <= budget:
            break
    return workers, needs
