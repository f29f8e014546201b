"""A loaded model and a text's sequences → a trace file, with a header that says what the model is and what an expert
weighs in each precision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from tiermoe import __version__
from tiermoe.config import BITS, Settings
from tiermoe.engine.engine import engine_of
from tiermoe.kernels import machine_layout
from tiermoe.measure.measure_times import measure_times
from tiermoe.measure.recorder import DISTANCES, Recorder
from tiermoe.measure.sequences import Cut
from tiermoe.model.prepare_store import Progress
from tiermoe.store.layout import expert_format
from tiermoe.store.neurons import neuron_format, record_place
from tiermoe.store.store import Store, precision_key
from tiermoe.trace.file import TraceWriter
from tiermoe.trace.schema import Header, Times

MadeFrom = dict[str, str | int | float]


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
    layout = machine_layout(str(engine.device))
    slots = slot_bytes(store, engine.settings.quantizer_used, layout)
    return Header(
        model=store.source.name,
        fingerprint=store.source.fingerprint,
        experts=[layer.experts for layer in store.layers],
        top_k=[layer.top_k for layer in store.layers],
        expert_bytes=stored_bytes(store, engine.settings.quantizer_used, layout),
        slot_bytes=slots,
        copied_bytes=slots,  # a copy to a GPU fills the slot
        times=times,
        holds=holds,
        forecast_distances=distances,
        dense_bytes=plan.dense,
        encoder_layers=sum(layer.name.startswith("encoder.") for layer in store.layers),
        made_from=made_from,
        **(neuron_sizes(store, engine.settings, engine.dtype) if "neurons" in holds else {}),
    )


def neuron_sizes(store: Store, settings: Settings, dtype: torch.dtype) -> dict[str, Any]:
    """`head_bytes`, `neuron_bytes`, `neurons` and `neuron_slot_bytes` of a header: of the first MoE layer (all are of
    one shape), as the neuron unit stores it in the settings' bits, in 4 where there is no such unit of them."""
    forms = {
        bits: neuron_format(store.layers[0], bits, dtype, machine_layout("cpu"), settings.quantizer_used)
        for bits in (4, 2)
    }
    place = record_place(forms.get(settings.bits_used, forms[4]))
    return {
        "head_bytes": place.stored_at,
        "neuron_bytes": place.record_bytes,
        "neurons": place.neurons,
        "neuron_slot_bytes": {bits: form.slot.nbytes for bits, form in forms.items()},
    }


def expert_bytes(store: Store, quantizer: str, layout: str) -> dict[int, list[int]]:
    """Bits → bytes that reading one expert of each layer costs, of the precisions that the store holds."""
    found = {}
    for bits in BITS:
        packed = store.precisions.get(precision_key(bits, quantizer, layout))
        if packed is not None:
            found[bits] = [max(extent.nbytes for extent in layer.extents) for layer in packed.layers]
    return found


def stored_bytes(store: Store, quantizer: str, layout: str) -> dict[int, list[int]]:
    """The same of every precision: of those that the store does not hold, as packing them would make it."""
    packed = expert_bytes(store, quantizer, layout)
    return {
        bits: packed.get(bits)
        or [expert_format(layer, bits, store.dtype, layout, quantizer).stored.nbytes for layer in store.layers]
        for bits in BITS
    }


def slot_bytes(store: Store, quantizer: str, layout: str) -> dict[int, list[int]]:
    """Bits → bytes of the slot that an expert of each layer takes, of every precision: it is a matter of shapes."""
    return {
        bits: [expert_format(layer, bits, store.dtype, layout, quantizer).slot.nbytes for layer in store.layers]
        for bits in BITS
    }


def write_trace(
    path: Path,
    model: Any,
    ids: torch.Tensor,
    shape: Cut,
    made_from: MadeFrom,
    progress: Progress,
    distances: Sequence[int] = DISTANCES,
    little: bool = True,
    theta: float | None = None,
    little_k: int | None = None,
) -> None:
    """Records the sequences `ids` (sequences, length) and writes them to `path`, which appears whole or not at all.
    Times are measured first, on the first sequence. distances, little, theta, little_k: as for `Recorder`. TraceError
    where `path` cannot be written."""
    times = measure_times(model, ids[0], shape.prompt)
    if theta is not None:
        made_from = {**made_from, "theta": theta}
    if little_k is not None:
        made_from = {**made_from, "little": little_k}
    with Recorder(model, distances, little, theta, little_k) as recorder:
        header = header_of(model, times, recorder.holds, recorder.distances, made_from)
        with TraceWriter(path, header) as writer:
            done = 0
            for number, sequence in enumerate(ids):
                for passed in recorder.passes(sequence, shape.prompt, number):
                    writer.add(passed)
                    done += 1
                    progress("recording", done, shape.passes)


def made_from(text_name: str, text: str, shape: Cut, settings: Settings) -> MadeFrom:
    """What a trace or a profile is made from, beside the checkpoint: the same of the same, so without a date."""
    return {
        "text": text_name,
        "text_xxh3": xxhash.xxh3_64_hexdigest(text.encode()),
        "tokens": shape.sequences * shape.sequence,
        "prompt": shape.prompt,
        "sequence": shape.sequence,
        "bits": settings.bits_used,
        "dense_bits": settings.dense_bits_used,
        "quantizer": settings.quantizer_used,
        "version": __version__,
    }
