"""The header of a trace: what the model is, what an expert weighs in each precision that its store holds."""

from __future__ import annotations

from typing import Any

import torch

from tiermoe.config import BITS, Settings
from tiermoe.kernels import machine_layout
from tiermoe.runtime.engine import engine_of
from tiermoe.store.neurons import neuron_format, record_place
from tiermoe.store.store import Store, precision_key
from tiermoe.trace import Header, Times


def header_of(
    model: Any,
    times: Times | None,
    holds: frozenset[str],
    distances: tuple[int, ...],
    made_from: dict[str, str | int | float],
) -> Header:
    """The header of a loaded model's trace. Where it holds neurons, ModelError or ConfigError for experts that the
    neuron unit cannot take."""
    engine = engine_of(model)
    store, plan = engine.store, engine.plan
    return Header(
        model=store.source.name,
        fingerprint=store.source.fingerprint,
        experts=[layer.experts for layer in store.layers],
        top_k=[layer.top_k for layer in store.layers],
        expert_bytes=expert_bytes(store, engine.settings.quantizer, machine_layout(str(engine.device))),
        times=times,
        holds=holds,
        forecast_distances=distances,
        dense_bytes=plan.dense,
        encoder_layers=sum(layer.name.startswith("encoder.") for layer in store.layers),
        made_from=made_from,
        **(neuron_sizes(store, engine.settings, engine.dtype) if "neurons" in holds else {}),
    )


def neuron_sizes(store: Store, settings: Settings, dtype: torch.dtype) -> dict[str, int]:
    """`head_bytes`, `neuron_bytes` and `neurons` of a header: of the first MoE layer (all are of one shape), as the
    neuron unit stores it in the settings' bits, in 4 where there is no such unit of them."""
    bits = settings.bits if settings.bits in (4, 2) else 4
    form = neuron_format(store.layers[0], bits, dtype, machine_layout("cpu"), settings.quantizer)
    place = record_place(form)
    return {"head_bytes": place.stored_at, "neuron_bytes": place.record_bytes, "neurons": place.neurons}


def expert_bytes(store: Store, quantizer: str, layout: str) -> dict[int, list[int]]:
    """Bits → bytes that reading one expert of each layer costs, of the precisions that the store holds."""
    found = {}
    for bits in BITS:
        packed = store.precisions.get(precision_key(bits, quantizer, layout))
        if packed is not None:
            found[bits] = [max(extent.nbytes for extent in layer.extents) for layer in packed.layers]
    return found
