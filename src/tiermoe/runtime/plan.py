"""What would go where in the memory budget, computed before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiermoe.compose import cache_bytes
from tiermoe.config import KIB, MIB, CacheSize, Settings, format_size
from tiermoe.errors import BudgetError, ConfigError
from tiermoe.kernels import machine_layout
from tiermoe.policy.prediction import asks_routers
from tiermoe.runtime import gpu_plan
from tiermoe.runtime.activations import activation_bytes
from tiermoe.runtime.blueprint import Blueprint
from tiermoe.runtime.composition import Resolved
from tiermoe.runtime.dense import dense_bytes, recipe
from tiermoe.runtime.dense_weights import loading_needs
from tiermoe.runtime.embedding import embedding_bytes
from tiermoe.runtime.footprint import resident_bytes
from tiermoe.runtime.kv_needs import kv_bytes
from tiermoe.runtime.memory_plan import MemoryPlan
from tiermoe.runtime.needs import Need, Phase, in_words, total
from tiermoe.runtime.prepare_store import packing_needs
from tiermoe.runtime.slot_pools import pools_in, require_all, shape_of
from tiermoe.runtime.system import available_memory
from tiermoe.runtime.units import require_device, unit_format
from tiermoe.store.layout import ExpertFormat
from tiermoe.tiers.cuda import resolve_device
from tiermoe.tiers.disk import LANES, staging_bytes

DEFAULT_CONTEXT = 4096
_FIRST_USE = 46 * MIB  # library code and heap that the first forward pass brings in: 43 MiB measured
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
    fixed: dict[str, Any] = running_bytes(blueprint, formats, settings, context, layout)
    fixed["staging"] += held
    room = budget - sum(fixed.values())
    wanted = cache_bytes(composition, settings.cache or CacheSize(fraction=1.0), shape_of(blueprint.layers), sizes)
    left_on_disk = embedding_bytes(blueprint) if gpu is None and room < wanted else 0
    fixed["dense"] -= left_on_disk
    room += left_on_disk
    before = _before_running(
        blueprint, resolved, layout, fixed["interpreter"] - _FIRST_USE, fixed["dense"], gpu is None
    )
    base = MemoryPlan(
        budget, source, slot_bytes=slot_bytes, slots=0, all_slots=all_slots, layer_slots=layer_slots,
        token_slots=token_slots, context=context, dense_bits=_dense_bits(blueprint, settings.dense_bits_used),
        embedding_on_disk=left_on_disk > 0,
        packing=total(before, Phase.PACKING), loading=total(before, Phase.LOADING), **fixed,
    )  # fmt: skip
    if gpu is not None:
        return gpu_plan.divide(base, wanted // slot_bytes, resolved, sizes, device, gpu)
    if min(room, wanted) < layer_slots * slot_bytes:
        _refuse(settings, budget, fixed, slot_bytes, layer_slots, wanted // slot_bytes, blueprint, formats)
    _check_phases(budget, before)
    pools = pools_in(min(room, wanted), resolved, sizes, all_slots)
    if composition.cache == "all":
        require_all(pools, all_slots, wanted - room)
    plan = replace(base, slots=sum(pool.slots for pool in pools), pools=pools)
    plan.warnings.extend(_warnings(plan, settings))
    return plan


def _check_options(blueprint: Blueprint, resolved: Resolved) -> None:
    """ConfigError for an option that would do nothing for this family."""
    prefetch = resolved.composition.prefetch
    if blueprint.family.adapter and asks_routers(prefetch):
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


def running_bytes(
    blueprint: Blueprint, formats: list[ExpertFormat], settings: Settings, context: int, layout: str
) -> dict[str, int]:
    """What is held while the model runs, beside experts: field of MemoryPlan → bytes, each from its owner."""
    latent, itemsize = blueprint.family.latent_kv, blueprint.dtype.itemsize
    return {
        "interpreter": resident_bytes() + _FIRST_USE,
        "dense": dense_bytes(blueprint, settings.dense_bits_used, layout),
        "kv_cache": kv_bytes(blueprint.config, latent, context, settings.chunk, settings.batch, itemsize),
        "activations": activation_bytes(blueprint, formats, settings, context),
        "staging": staging_bytes(formats, settings.lanes or LANES),
    }


def _before_running(
    blueprint: Blueprint, resolved: Resolved, layout: str, interpreter: int, dense: int, on_cpu: bool
) -> list[Need]:
    """What packing, where the store lacks something, and loading need. Onto a GPU layers go one after the other."""
    needs = packing_needs(blueprint, resolved, layout)
    if needs:
        needs.append(Need("interpreter", interpreter + _FIRST_USE, Phase.PACKING))
    if on_cpu:
        needs += [Need("interpreter", interpreter, Phase.LOADING), *loading_needs(blueprint, dense)]
    return needs


def _check_phases(budget: int, needs: list[Need]) -> None:
    """BudgetError where packing or loading takes more than the budget."""
    for phase, happens in ((Phase.PACKING, "packing, once,"), (Phase.LOADING, "loading")):
        needed = total(needs, phase)
        if needed > budget:
            raise BudgetError(
                f"{format_size(budget)} are too little: {happens} needs {format_size(needed)} "
                f"({in_words(needs, phase)}). Use --memory {-(-(needed + _VARIES) // MIB)}MiB or more"
            )


def _budget(settings: Settings) -> tuple[int, str]:
    if settings.memory is not None:
        return settings.memory, "--memory"
    free, source = available_memory()
    return int(free * _SHARE_OF_FREE) + resident_bytes(), f"{_SHARE_OF_FREE:.0%} of the {format_size(free)} {source}"


def _dense_bits(blueprint: Blueprint, bits: int) -> str:
    more = ", ".join(f"{kind} {own}" for kind, own in sorted(recipe(blueprint, bits).items()))
    return f"{bits} ({more})" if more else str(bits)


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
        dense = dense_bytes(blueprint, bits, machine_layout("cpu"))
        return dense + activation_bytes(blueprint, formats, other, context)

    for bits in (8, 4):
        if bits < settings.dense_bits_used:
            saved = cost(settings.dense_bits_used) - cost(bits)
            if needed - saved <= budget:
                return f", or --dense-bits {bits}, which saves {format_size(saved)}"
    if settings.context is None or settings.context > 512:
        return ", or a smaller --context, --chunk or --dense-bits"
    return ""
