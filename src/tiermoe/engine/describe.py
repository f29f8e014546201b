"""Facts about a model or a store, for `tiermoe show`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from tiermoe.config import Settings
from tiermoe.engine.load import resolve_for
from tiermoe.engine.what_runs import what_runs
from tiermoe.errors import LoadError
from tiermoe.families import FAMILIES
from tiermoe.kernels import machine_layout
from tiermoe.model.blueprint import Blueprint
from tiermoe.model.dense import kind_of, recipe_key
from tiermoe.model.hub import is_store
from tiermoe.model.prepare_store import found_store, store_root
from tiermoe.model.remote import inspect_without_download
from tiermoe.quant.registry import encoding_named
from tiermoe.store.own_experts import label_of
from tiermoe.store.store import Store, open_store, precision_key
from tiermoe.tiers.cuda import resolve_device
from tiermoe.tiers.reader import ExtentReader, aligned_memory
from tiermoe.types import ExpertKey, Extent, MoeLayer


def describe_model(model: str, chosen: Path | None = None) -> dict[str, Any]:
    """Facts of a checkpoint and of its store, where it has one. Of a model on the hub headers alone are read."""
    blueprint, download = inspect_without_download(model, chosen)
    runs = what_runs(blueprint, resolve_for(blueprint, Settings(store=chosen)))
    root = store_root(blueprint, chosen)
    store = open_store(root) if is_store(root) else None
    if blueprint.own_experts is not None:
        store = found_store(blueprint, chosen)
    expert_weights = sum(layer.experts * layer.expert_elements for layer in blueprint.layers)
    dense_bytes = blueprint.dense_bytes()
    return {
        "name": model,
        "family": blueprint.family.name,
        "dtype": str(blueprint.dtype).removeprefix("torch."),
        **_stored_as(blueprint),
        **_layer_facts(blueprint.layers),
        "expert_weights": f"{expert_weights:,}",
        "dense_weights_bytes": dense_bytes,
        "experts_at_16_bits_bytes": expert_weights * blueprint.dtype.itemsize,
        "context": blueprint.max_context() or "unbounded",
        "not_read": blueprint.unread,
        "not_run": f"its own code, of {blueprint.own_code}" if blueprint.own_code else "",
        "decoder": runs.decoder,
        "kernels": runs.kernels,
        **({"download_bytes": download.nbytes} if download else {"checkpoint": str(blueprint.directory)}),
        "fingerprint": "" if download else blueprint.checkpoint.fingerprint(),
        "store": str(root) if is_store(root) else "",
        "precisions": _precision_facts(store) if store else [],
    }


def describe_store(root: Path) -> dict[str, Any]:
    """Facts of a store alone."""
    store = open_store(root)
    family = FAMILIES.get(store.source.model_type)
    return {
        "name": store.source.name,
        "family": family.name if family else store.source.model_type,
        "dtype": store.source.dtype,
        **_layer_facts(store.layers),
        "fingerprint": store.source.fingerprint,
        "store": str(root),
        "precisions": _precision_facts(store),
    }


def loss_of(engine: Any, blueprint: Blueprint) -> str:
    """`packing_loss` of what a loaded model runs on."""
    settings, unit = engine.settings, engine.composition.unit
    layout = machine_layout(resolve_device(settings.device))
    keys = [precision_key(bits, settings.quantizer_used, layout, unit) for bits in engine.precisions]
    return packing_loss(engine.store, keys, recipe_key(blueprint, settings.dense_bits_used, layout))


_COSTS = {
    "8": "0.05% of perplexity",
    "4-hqq": "0.6% of perplexity, as llama.cpp's Q4_0 does",
    "4-gptq": "0.2% of perplexity, less than llama.cpp's Q4_0 does",
    "4-gptq-nonlinear": "0.2% of perplexity, less than llama.cpp's Q4_0 does",
    "3-gptq-nonlinear": "1.2% of perplexity",
    "3-nonlinear": "2% of perplexity",
    "2-hqq": "6% of perplexity",
}
"""Precision of experts → what it costs the shipped model: docs/results.md, "Quality by precision"; 3 bits without GPTQ:
docs/notebook/codes.md."""


def packing_loss(store: Store, precisions: Sequence[str], dense: str) -> str:
    """What packing costs, in a line for people who have never packed: the bits of experts in `precisions`, and of the
    layers packed under the key `dense` (if the store has it), and what the fewest of experts' cost in quality where
    that was measured. Empty where all are the checkpoint's own."""
    found = [f"experts at {bits} bits" for bits in (store.precisions[key].bits for key in precisions) if bits < 16]
    by_bits: dict[int, list[str]] = {}
    for name, entry in store.dense.get(dense, {"layers": {}})["layers"].items():
        by_bits.setdefault(encoding_named(entry["encoding"]).bits, []).append(name)
    for bits, names in sorted(by_bits.items()):
        found.append(f"{_kinds(names) if bits != min(by_bits) else 'other layers'} at {bits} bits")
    if not found:
        return ""
    cost = _COSTS.get(min(precisions, key=lambda key: store.precisions[key].bits))
    told = f"experts at so many bits cost the shipped model {cost} (docs/results.md); " if cost else ""
    return f"packed: {', '.join(found)}; {told}'tiermoe eval MODEL --text FILE' measures the loss in quality here"


def _kinds(names: Iterable[str]) -> str:
    """What layers are called, each once: 'v_proj and lm_head'."""
    return " and ".join(dict.fromkeys(map(kind_of, names)))


def verify_store(root: Path, progress: Callable[[int, int], None]) -> tuple[int, list[str]]:
    """Reads every extent of a store; returns how many, and a line for each that is damaged."""
    extents = _all_extents(open_store(root))
    reader = ExtentReader()
    memory = aligned_memory(0)
    damaged: list[str] = []
    for done, (key, what, extent) in enumerate(extents, 1):
        needed = max(segment.at + segment.nbytes for segment in extent.segments)
        if len(memory) < needed:
            memory = aligned_memory(needed)
        try:
            reader.read(extent, memory, key)
        except LoadError as error:
            damaged.append(what or str(error).partition(";")[0])
        progress(done, len(extents))
    reader.close()
    return len(extents), damaged


def _stored_as(blueprint: Blueprint) -> dict[str, str]:
    """What the checkpoint's tensors lie in, and whether experts are used so."""
    checkpoint, sources = blueprint.checkpoint, blueprint.outline.sources
    ways = [way for layer in sources for names in layer.values() for name in names for way in checkpoint.ways(name, 0)]
    if blueprint.own_experts is not None:
        experts = f"{blueprint.own_types()}, used in place"
    else:
        types = sorted({way.for_people() for way in ways}) or [str(blueprint.dtype).removeprefix("torch.")]
        experts = f"{', '.join(types)}, packed before they run"
    keys = [tensor.key for tensor in blueprint.outline.tensors.values() if tensor.key is not None]
    own = {key: checkpoint.own_encoding(key) for key in keys}
    dense = {
        label_of(name) if name else str(checkpoint.tensors[key].dtype).removeprefix("torch.")
        for key, name in own.items()
    }
    return {"experts_stored_as": experts, "other_layers_stored_as": ", ".join(sorted(dense))}


def _layer_facts(layers: list[MoeLayer]) -> dict[str, Any]:
    return {
        "moe_layers": len(layers),
        "experts_a_layer": max(layer.experts for layer in layers),
        "experts_a_token": max(layer.top_k for layer in layers),
    }


def _precision_facts(store: Store) -> list[dict[str, Any]]:
    facts: list[dict[str, Any]] = []
    for key, precision in store.precisions.items():
        extents = [extent for layer in precision.layers for extent in layer.extents]
        errors = [error for layer in precision.layers for error in layer.errors]
        facts.append(
            {
                "precision": key,
                "bytes": sum(extent.nbytes for extent in extents),
                "expert_bytes": max(extent.nbytes for extent in extents),
                "mean_error": mean(errors),
                "max_error": max(errors),
                "machine": precision.machine,
                "in_place": precision.in_place,
                "encodings": sorted({name for layer in precision.layers for name in layer.encodings.values()}),
            }
        )
    for bits, dense in store.dense.items():
        sizes = [store.dense_format(bits, name).stored.nbytes for name in dense["layers"]]
        errors = [layer["error"] for layer in dense["layers"].values()]
        facts.append(
            {
                "precision": f"dense layers at {bits}",
                "bytes": sum(sizes),
                "expert_bytes": max(sizes),
                "mean_error": mean(errors),
                "max_error": max(errors),
                "machine": dense["machine"],
                "in_place": False,
                "encodings": sorted({layer["encoding"] for layer in dense["layers"].values()}),
            }
        )
    return facts


def _all_extents(store: Store) -> list[tuple[ExpertKey, str, Extent]]:
    """Every extent with its key and, for a dense layer, the line to say where it is damaged."""
    found: list[tuple[ExpertKey, str, Extent]] = []
    for precision in store.precisions.values():
        for index, layer in enumerate(precision.layers):
            for expert, extent in enumerate(layer.extents):
                found.append((ExpertKey(index, expert, precision.bits), "", extent))
    for bits, dense in store.dense.items():
        for name in dense["layers"]:
            extent = store.dense_extent(bits, name)
            what = f"dense layer {name} ({bits} bits) is damaged"
            found.append((ExpertKey(0, 0, int(bits.partition("-")[0])), what, extent))
    return found
