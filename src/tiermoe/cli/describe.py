"""Description of a model or a store: its facts, what computes it on this machine, what packing cost. For `tiermoe
show`, `plan` and `pack`, and for the lines that a command prints when a model is loaded.

Importing this module imports torch; commands do it when they run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from tiermoe import native
from tiermoe.config import Settings
from tiermoe.engine.backend import left_to_torch
from tiermoe.engine.engine import Engine
from tiermoe.engine.load import resolve_for
from tiermoe.errors import LoadError
from tiermoe.formats.registry import encoding_named
from tiermoe.formats.source import label_of
from tiermoe.formats.store import MTP_FOLDER, Store, open_store, precision_key
from tiermoe.kernels.linear import cpu_kernels
from tiermoe.model.families import FAMILIES, decoder_family, has_decoder, not_computed
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.hf.hub import inspect_without_download
from tiermoe.model.packing import kind_of, recipe_key
from tiermoe.model.prepare_store import found_store, is_store, store_root
from tiermoe.offload.cuda import resolve_device
from tiermoe.offload.presets import Resolved
from tiermoe.offload.reader import ExtentReader, aligned_memory
from tiermoe.types import ExpertKey, Extent, MoeLayer

_INFERIOR = {
    "avxvnni": "this processor has no AVX-512 with BF16 and VBMI",
    "avx2": "this processor has neither AVX-512 with BF16 and VBMI nor AVX-VNNI",
    "neon": "this processor has no dot products of bytes",
    "generic": "this processor has neither AVX2 nor NEON",
}
"""Instruction set of the native kernels → why it is not a faster one."""
_QUALITY_COST = {
    "8": "0.05% of perplexity",
    "4-hqq": "0.6% of perplexity, as llama.cpp's Q4_0 does",
    "4-gptq": "0.2% of perplexity, less than llama.cpp's Q4_0 does",
    "4-gptq-nonlinear": "0.2% of perplexity, less than llama.cpp's Q4_0 does",
    "3-gptq-nonlinear": "1.2% of perplexity",
    "3-nonlinear": "2% of perplexity",
    "2-gptq-nonlinear": "2.7% of perplexity",
    "2-hqq": "17% of perplexity",
}
"""Precision of experts → the shipped model's loss in quality: docs/results.md, "Quality by precision"; 3 bits without
GPTQ, and 2 bits: notebook/2026-11-22-codes.md and notebook/2026-11-25-two-bits.md."""


# --- facts ---


def describe_model(model: str, chosen: Path | None = None) -> dict[str, Any]:
    """Facts of a checkpoint and of its store, by name. Of a model on the hub only headers are read. chosen: folder of
    the store; None: the usual one."""
    blueprint, download = inspect_without_download(model, chosen)
    backend = backend_of(blueprint, resolve_for(blueprint, Settings(store=chosen)))
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
        "not_read": blueprint.config.unread,
        "not_run": f"its own code, of {blueprint.own_code}" if blueprint.own_code else "",
        "decoder": backend.decoder,
        "kernels": backend.kernels,
        **({"download_bytes": download.nbytes} if download else {"checkpoint": str(blueprint.directory)}),
        "fingerprint": "" if download else blueprint.checkpoint.fingerprint(),
        "store": str(root) if is_store(root) else "",
        "precisions": _all_precision_facts(store) if store else [],
    }


def describe_store(root: Path) -> dict[str, Any]:
    """Facts of a store without its checkpoint, by name."""
    store = open_store(root)
    family = FAMILIES.get(store.source.model_type)
    return {
        "name": store.source.name,
        "family": family.name if family else store.source.model_type,
        "dtype": store.source.dtype,
        **_layer_facts(store.layers),
        "fingerprint": store.source.fingerprint,
        "store": str(root),
        "precisions": _all_precision_facts(store),
    }


def _stored_as(blueprint: Blueprint) -> dict[str, str]:
    """Types of the checkpoint's tensors, and whether experts run in them."""
    checkpoint, sources = blueprint.checkpoint, blueprint.outline.sources
    ways = [
        way for layer in sources for names in layer.values() for name in names for way in checkpoint.stored_as(name, 0)
    ]
    if blueprint.own_experts is not None:
        experts = f"{blueprint.own_types()}, used in place"
    else:
        types = sorted({way.label for way in ways}) or [str(blueprint.dtype).removeprefix("torch.")]
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


def _all_precision_facts(store: Store) -> list[dict[str, Any]]:
    """`_precision_facts` of a store, and of its MTP head's if it has one."""
    head = store.root / MTP_FOLDER
    of_head = _precision_facts(open_store(head)) if is_store(head) else []
    named = [{**facts, "precision": f"MTP head: {facts['precision']}"} for facts in of_head]
    return [*_precision_facts(store), *named]


def _precision_facts(store: Store) -> list[dict[str, Any]]:
    """Facts of each precision of the experts, then of the dense layers, that a store has."""
    facts: list[dict[str, Any]] = []
    for key, precision in store.precisions.items():
        sizes = [extent.nbytes for layer in precision.layers for extent in layer.extents]
        errors = [error for layer in precision.layers for error in layer.errors]
        names = {name for layer in precision.layers for name in layer.encodings.values()}
        facts.append(_packed_facts(key, sizes, errors, precision.in_place, names))
    for bits, dense in store.dense.items():
        layers = dense["layers"]
        sizes = [store.dense_format(bits, name).stored.nbytes for name in layers]
        errors = [layer["error"] for layer in layers.values()]
        names = {layer["encoding"] for layer in layers.values()}
        facts.append(_packed_facts(f"dense layers at {bits}", sizes, errors, False, names))
    return facts


def _packed_facts(
    label: str, sizes: list[int], errors: list[float], in_place: bool, encodings: set[str]
) -> dict[str, Any]:
    """Facts of packed weights. sizes: bytes of each expert or layer. errors: relative error of each."""
    return {
        "precision": label,
        "bytes": sum(sizes),
        "expert_bytes": max(sizes),
        "mean_error": mean(errors),
        "max_error": max(errors),
        "in_place": in_place,
        "encodings": sorted(encodings),
    }


# --- the store's checksums ---


def verify_store(root: Path, progress: Callable[[int, int], None]) -> tuple[int, list[str]]:
    """Reads a store and the store of its MTP head whole: (number of extents, a line for each damaged extent).
    progress: called with (extents read, all)."""
    roots = [each for each in (root, root / MTP_FOLDER) if each == root or is_store(each)]
    extents = [extent for each in roots for extent in _all_extents(open_store(each))]
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


def _all_extents(store: Store) -> list[tuple[ExpertKey, str, Extent]]:
    """(key, line to print if it is damaged, extent) of every expert and dense layer; the line is empty for
    experts, whose errors name them."""
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


# --- what packing cost ---


def loss_of(engine: Engine, blueprint: Blueprint) -> str:
    """`packing_loss` of the store's weights that a loaded model runs on."""
    settings, unit = engine.settings, engine.composition.unit
    keys = [precision_key(bits, settings.quantizer_used, unit) for bits in engine.precisions]
    return packing_loss(engine.store, keys, recipe_key(blueprint, settings.dense_bits_used))


def packing_loss(store: Store, precisions: Sequence[str], dense: str) -> str:
    """Words for people who have never packed: bits of the experts in `precisions` and of the dense layers under the
    key `dense` (if the store has it), and the loss in quality of the lowest precision if it was measured. Empty
    if all weights are the checkpoint's own."""
    found = [f"experts at {bits} bits" for bits in (store.precisions[key].bits for key in precisions) if bits < 16]
    by_bits: dict[int, list[str]] = {}
    for name, entry in store.dense.get(dense, {"layers": {}})["layers"].items():
        by_bits.setdefault(encoding_named(entry["encoding"]).bits, []).append(name)
    for bits, names in sorted(by_bits.items()):
        kinds = " and ".join(dict.fromkeys(map(kind_of, names)))  # 'v_proj and lm_head'
        found.append(f"{kinds if bits != min(by_bits) else 'other layers'} at {bits} bits")
    if not found:
        return ""
    cost = _QUALITY_COST.get(min(precisions, key=lambda key: store.precisions[key].bits))
    measured = f"experts at so many bits cost the shipped model {cost} (docs/results.md); " if cost else ""
    return f"{', '.join(found)}; {measured}'tiermoe eval MODEL --text FILE' measures the loss in quality here"


# --- decoder and kernels ---


@dataclass(frozen=True, slots=True)
class Backend:
    """Decoder and kernels that compute a model."""

    decoder: str  # in words
    kernels: str  # in words
    ours: bool  # a decoder of our own, not transformers' code
    by_torch: bool  # torch's operators compute the experts, on a CPU


def backend_of(blueprint: Blueprint, resolved: Resolved) -> Backend:
    """The backend of an engine with this model and these settings. ConfigError as `native.available`."""
    device = resolve_device(resolved.settings.device)
    why = _why_transformers(blueprint, resolved.settings.decoder, device)
    decoder = f"transformers' code ({why}): slower" if why else f"tiermoe's own, for {blueprint.config.model_type}"
    kernels, by_torch = _kernels(blueprint, resolved) if device == "cpu" else (f"Triton, on {device}", False)
    return Backend(decoder, kernels, not why, by_torch)


def why_not_faster(kernels: str) -> str:
    """Why the native kernels of this name are not faster ones; empty if they are the fastest that there are."""
    return _INFERIOR.get(kernels, "")


def missing_kernels(dtype: torch.dtype) -> str:
    """A line that says what to do where a model in `dtype` runs on a CPU without the compiled kernels; empty if they
    are there, or do not compute this dtype."""
    if native.available() or dtype != torch.bfloat16:
        return ""
    if _switched_off():
        return f"{native.SWITCH}=0 keeps the compiled kernels out: torch computes, slowly; unset it"
    return (
        "the compiled kernels are missing from this installation: torch computes, slowly; install a C compiler and "
        "reinstall tiermoe, or install one of its wheels"
    )


def _why_transformers(blueprint: Blueprint, asked: str, device: str) -> str:
    """Why transformers' code runs in place of our decoder; empty where our decoder runs."""
    config = blueprint.config
    if asked == "generic":
        return "--decoder generic"
    if blueprint.family.encodes or not has_decoder(config.model_type):
        return f"tiermoe has no decoder of its own for {config.model_type}"
    if lacking := not_computed(config):
        return f"tiermoe's decoder does not compute this config: {lacking}"
    return "" if decoder_family(config, device) else f"tiermoe's decoder for {config.model_type} computes on a CPU"


def _kernels(blueprint: Blueprint, resolved: Resolved) -> tuple[str, bool]:
    """(kernels in words, whether torch's operators compute experts)."""
    found = cpu_kernels()
    if not native.available():
        why = f"{native.SWITCH}=0" if _switched_off() else "this build has no native kernels"
        return f"{found}: {why}, slower", True
    if blueprint.dtype != torch.bfloat16:
        lacking = f"compute in bfloat16, the checkpoint is in {str(blueprint.dtype).removeprefix('torch.')}"
        return f"torch's operators: the native kernels ({found}) {lacking}", True
    left_out = left_to_torch(blueprint, resolved)
    if left_out:
        return f"{found}; torch's operators for experts' matrices of {left_out}, which it does not take: slower", True
    asked = os.environ.get(native.ISA)
    if asked:
        return f"{found}: {native.ISA}={asked}", False
    why = why_not_faster(found)
    return (f"{found}: {why}" if why else found), False


def _switched_off() -> bool:
    return os.environ.get(native.SWITCH) == "0"
