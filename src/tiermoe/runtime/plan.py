"""What would go where in the memory budget, computed before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from tiermoe import native
from tiermoe.compose import cache_bytes
from tiermoe.config import KIB, MIB, CacheSize, Settings, format_size
from tiermoe.errors import BudgetError, ConfigError
from tiermoe.kernels import decodes, machine_layout
from tiermoe.presets import ROUTER_PREDICTIONS
from tiermoe.runtime import gpu_plan
from tiermoe.runtime.blueprint import Blueprint
from tiermoe.runtime.composition import Resolved
from tiermoe.runtime.dense import packed_bytes, recipe
from tiermoe.runtime.embedding import embedding_bytes
from tiermoe.runtime.footprint import resident_bytes
from tiermoe.runtime.memory_plan import MemoryPlan
from tiermoe.runtime.slot_pools import pools_in, require_all, shape_of
from tiermoe.runtime.system import available_memory
from tiermoe.runtime.units import require_device, unit_format
from tiermoe.store.layout import PAGE, ExpertFormat, align
from tiermoe.tiers.cuda import resolve_device

DEFAULT_CONTEXT = 4096
_FIRST_USE = 46 * MIB  # library code and heap that the first forward pass brings in: 43 MiB measured
_ALLOCATOR = 1.15  # what the allocator holds beyond the tensors that live, measured
_PACKED_OPERATOR_TOKENS = 12  # from more tokens on, kernels may decode a matrix first (kernels/cpu.py)
_SHARE_OF_FREE = 0.8
_VARIES = 4 * MIB  # by how much the interpreter's size differs from run to run


def plan_memory(blueprint: Blueprint, resolved: Resolved) -> MemoryPlan:
    """Divides the budget. BudgetError, with the numbers and the nearest setting that would do, where what must be
    there and one layer's experts do not fit."""
    settings, composition = resolved.settings, resolved.composition
    device = resolve_device(settings.device)
    require_device(composition, device.partition(":")[0])
    _check_options(blueprint, resolved)
    layout = machine_layout(device)
    gpu = gpu_plan.gpu_budget(settings, device)  # first: it starts CUDA, which the interpreter's size includes
    budget, source = _budget(settings)
    by_bits = {
        bits: [
            unit_format(composition.unit, layer, bits, blueprint.dtype, layout, settings.quantizer)
            for layer in blueprint.layers
        ]
        for bits in resolved.precisions
    }
    formats = [form for forms in by_bits.values() for form in forms]
    sizes = {bits: max(form.slot.nbytes for form in forms) for bits, forms in by_bits.items()}
    slot_bytes = sizes[resolved.precisions[0]]
    all_slots = sum(layer.experts for layer in blueprint.layers)
    layer_slots = max(layer.top_k for layer in blueprint.layers)
    token_slots = sum(layer.top_k for layer in blueprint.layers)
    context = context_of(blueprint, settings)
    held = 0
    if composition.store == "memory":
        held = sum(form.stored.nbytes * form.layer.experts for form in formats)
    fixed: dict[str, Any] = {
        "interpreter": resident_bytes() + _FIRST_USE,
        "dense": _dense_bytes(blueprint, settings.dense_bits_used, layout),
        "kv_cache": kv_bytes(
            blueprint.config, blueprint.family.latent_kv, context, settings.batch, blueprint.dtype.itemsize
        ),
        "activations": _activation_bytes(blueprint, formats, settings, context),
        "staging": _staging_bytes(formats, settings) + held,
    }
    room = budget - sum(fixed.values())
    wanted = cache_bytes(composition, settings.cache or CacheSize(fraction=1.0), shape_of(blueprint.layers), sizes)
    left_on_disk = embedding_bytes(blueprint) if gpu is None and room < wanted else 0
    fixed["dense"] -= left_on_disk
    room += left_on_disk
    base = MemoryPlan(
        budget, source, slot_bytes=slot_bytes, slots=0, all_slots=all_slots, layer_slots=layer_slots,
        token_slots=token_slots, context=context, dense_bits=_dense_bits(blueprint, settings.dense_bits_used),
        embedding_on_disk=left_on_disk > 0, **fixed,
    )  # fmt: skip
    if gpu is not None:
        return gpu_plan.divide(base, wanted // slot_bytes, resolved, sizes, device, gpu)
    if min(room, wanted) < layer_slots * slot_bytes:
        _refuse(settings, budget, fixed, slot_bytes, layer_slots, wanted // slot_bytes, blueprint, formats)
    pools = pools_in(min(room, wanted), resolved, sizes, all_slots)
    if composition.cache == "all":
        require_all(pools, all_slots, wanted - room)
    plan = replace(base, slots=sum(pool.slots for pool in pools), pools=pools)
    plan.warnings.extend(_warnings(plan, settings))
    return plan


def _check_options(blueprint: Blueprint, resolved: Resolved) -> None:
    """ConfigError for an option that would do nothing for this family."""
    prefetch = resolved.composition.prefetch
    if blueprint.family.adapter and prefetch in ROUTER_PREDICTIONS:
        raise ConfigError(
            f"prefetch={prefetch} does not apply to {blueprint.family.name}: its router names no experts by index; "
            f"use --set prefetch=path or none"
        )
    if not blueprint.family.encoder_decoder:
        return
    if resolved.settings.chunk != Settings().chunk:
        raise ConfigError(f"chunk does not apply to {blueprint.family.name}: an encoder reads its prompt at once")


def context_of(blueprint: Blueprint, settings: Settings) -> int:
    """Tokens to reserve key/value memory for. ConfigError where more are asked for than the model was made for."""
    longest = blueprint.max_context()
    if settings.context is not None:
        if longest is not None and settings.context > longest:
            raise ConfigError(
                f"a context of {settings.context:,} tokens is more than the {longest:,} that the model was made for; "
                f"lower --context"
            )
        return settings.context
    return min(DEFAULT_CONTEXT, longest) if longest else DEFAULT_CONTEXT


def kv_bytes(config: Any, latent: bool, context: int, batch: int, itemsize: int) -> int:
    """Bytes of keys and values of `context` tokens in all layers, and of the copy of one layer's that transformers'
    growing cache makes while it appends. `latent`: a compressed cache, of which one layer at a time is expanded."""
    heads, kv_heads, head_dim = attention_shape(config)
    expanded = 0
    if latent:
        per_token = int(config.kv_lora_rank + config.qk_rope_head_dim)
        expanded = int(heads * (2 * config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim))
    else:
        per_token = 2 * kv_heads * head_dim
    layers = int(getattr(config, "num_decoder_layers", None) or config.num_hidden_layers)
    if getattr(config, "is_encoder_decoder", False):
        layers *= 2  # the decoder's own and the cross attention to the prompt
    return batch * context * itemsize * (per_token * (layers + 2) + expanded)


def _budget(settings: Settings) -> tuple[int, str]:
    if settings.memory is not None:
        return settings.memory, "--memory"
    free, source = available_memory()
    return int(free * _SHARE_OF_FREE) + resident_bytes(), f"{_SHARE_OF_FREE:.0%} of the {format_size(free)} {source}"


def _dense_bytes(blueprint: Blueprint, dense_bits: int, layout: str) -> int:
    dense = blueprint.dense_bytes()
    if dense_bits == 16:
        return dense
    plain, packed = packed_bytes(blueprint, dense_bits, layout)
    return dense - plain + packed


def _dense_bits(blueprint: Blueprint, bits: int) -> str:
    more = ", ".join(f"{kind} {own}" for kind, own in sorted(recipe(blueprint, bits).items()))
    return f"{bits} ({more})" if more else str(bits)


def _staging_bytes(formats: list[ExpertFormat], settings: Settings) -> int:
    """What reading lanes hold beside the slots: a bounce buffer for experts served from the checkpoint in place, whose
    offsets are not aligned, or the stored bytes of a precision that is widened into the slot."""
    lanes = settings.lanes or 4
    stored = max(form.stored.nbytes for form in formats)
    if any(form.bits == 16 for form in formats) or any(form.widened for form in formats):
        return lanes * (align(stored, PAGE) + PAGE)
    return 0


def _activation_bytes(blueprint: Blueprint, formats: list[ExpertFormat], settings: Settings, context: int) -> int:
    """The most that one chunk needs beside weights and cache: a layer's tensors that live at the same time (those of a
    norm with its float32 copies, of its attention or of its experts), one decoded matrix where many tokens meet packed
    weights, and the logits.
    Checked against measured peaks (docs/results.md)."""
    config, item = blueprint.config, blueprint.dtype.itemsize
    at_once = context if blueprint.family.encoder_decoder else min(settings.chunk, context)
    tokens = at_once * settings.batch
    hidden = int(getattr(config, "hidden_size", 0) or config.d_model)
    heads, kv_heads, head_dim = attention_shape(config)
    matrices = [part.out_in for form in formats for part in form.layer.parts if part.is_matrix]
    top_k = max(layer.top_k for layer in blueprint.layers)
    residual = 2 * hidden * item
    norm = hidden * (item + 3 * 4)
    attention = heads * head_dim * (8 * item + 3 * 4)
    experts = (hidden * (top_k + 3) + 3 * max(map(max, matrices))) * item
    scores = tokens * context * 5
    repeated = 2 * settings.batch * context * heads * head_dim * item if kv_heads < heads else 0
    logits = settings.batch * int(config.vocab_size) * 16
    return (
        int(tokens * (residual + max(norm, attention, experts)) * _ALLOCATOR)
        + scores
        + repeated
        + (_decoded_bytes(formats, settings, blueprint.dtype) if tokens > _PACKED_OPERATOR_TOKENS else 0)
        + logits
    )


def _decoded_bytes(formats: list[ExpertFormat], settings: Settings, dtype: torch.dtype) -> int:
    """The largest matrix that a kernel decodes for many tokens, with its temporaries; 0 where none does. Dense layers
    are about as large as experts' matrices."""
    parts = [(form, part) for form in formats for part in form.layer.parts if part.is_matrix]
    dense = settings.dense_bits_used == 8 or (settings.dense_bits_used == 4 and not native.available())
    decoded = [
        math.prod(part.out_in)
        for form, part in parts
        if dense or decodes(form.encodings.get(part.name), *part.out_in, dtype)
    ]
    return max(decoded) * dtype.itemsize + 4 * MIB if decoded else 0


def attention_shape(config: Any) -> tuple[int, int, int]:
    """(heads, key/value heads, size of a head) of a config, whatever its family calls them."""
    heads = int(getattr(config, "num_attention_heads", 0) or config.num_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    hidden = int(getattr(config, "hidden_size", 0) or config.d_model)
    head_dim = int(getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or hidden // heads)
    return heads, kv_heads, head_dim


def _warnings(plan: MemoryPlan, settings: Settings) -> list[str]:
    if plan.slots < plan.all_slots and plan.slots < plan.token_slots:
        return [
            f"the cache holds {plan.slots} experts, one token uses {plan.token_slots}: an LRU cache of that size "
            f"hits almost never; from {format_size(plan.fixed + plan.token_slots * plan.slot_bytes)} on it does"
        ]
    return []


def _refuse(
    settings: Settings,
    budget: int,
    fixed: dict[str, int],
    slot_bytes: int,
    layer_slots: int,
    wanted: int,
    blueprint: Blueprint,
    formats: list[ExpertFormat],
) -> None:
    needed = sum(fixed.values()) + layer_slots * slot_bytes
    if wanted < layer_slots and needed <= budget:
        raise BudgetError(
            f"a cache of {wanted} experts cannot hold the {layer_slots} that one layer uses for a token; "
            f"use --cache {layer_slots * slot_bytes // KIB}KiB or more"
        )
    parts = ", ".join(f"{name.replace('_', ' ')} {format_size(size)}" for name, size in fixed.items())
    cheaper = _cheaper(blueprint, formats, settings, needed, budget)
    raise BudgetError(
        f"{format_size(budget)} are too little: {parts} and one layer's {layer_slots} experts "
        f"{format_size(layer_slots * slot_bytes)} need {format_size(needed)}. "
        f"Use --memory {-(-(needed + _VARIES) // MIB)}MiB or more{cheaper}"
    )


def _cheaper(blueprint: Blueprint, formats: list[ExpertFormat], settings: Settings, needed: int, budget: int) -> str:
    """Fewer bits of dense layers that are enough; else what else would help."""

    def cost(bits: int) -> int:
        other, context = replace(settings, dense_bits=bits), context_of(blueprint, settings)
        dense = _dense_bytes(blueprint, bits, machine_layout("cpu"))
        return dense + _activation_bytes(blueprint, formats, other, context)

    for bits in (8, 4):
        if bits < settings.dense_bits_used:
            saved = cost(settings.dense_bits_used) - cost(bits)
            if needed - saved <= budget:
                return f", or --dense-bits {bits}, which saves {format_size(saved)}"
    if settings.context is None or settings.context > 512:
        return ", or a smaller --context, --chunk or --dense-bits"
    return ""
