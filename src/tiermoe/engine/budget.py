"""How a memory budget is divided, before anything is loaded: the owners' needs summed, the rest divided into slots,
on a GPU and in main memory; or refused in words, with the numbers and the nearest setting that would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from tiermoe import native
from tiermoe.config import KIB, MIB, CacheSize, Settings, format_size
from tiermoe.engine.memory_plan import GpuMemoryPlan, MemoryPlan, in_words, least_room, planned_slots, total
from tiermoe.engine.needs import (
    PlanInputs,
    formats_of,
    layers_for,
    longest_request,
    of_large_steps,
    prompt_chunks,
    while_loading,
    while_packing,
    while_running,
)
from tiermoe.errors import BudgetError, ConfigError
from tiermoe.formats.store import Store
from tiermoe.kernels.gates import gate_named, slow_gate
from tiermoe.model.attention.compressed import CompressedSizes
from tiermoe.model.attention.latent import LatentSizes
from tiermoe.model.cache.memory import COLUMNS_OF_4
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.packing import own_linears, recipe, types_of
from tiermoe.model.stored_weights import embedding_bytes
from tiermoe.offload.assembly import ModelShape, cache_bytes
from tiermoe.offload.composition import require_device
from tiermoe.offload.cuda import free_memory, resolve_device
from tiermoe.offload.disk import few_lanes
from tiermoe.offload.policies.prediction import PREDICTIONS
from tiermoe.offload.presets import Resolved
from tiermoe.platform.machine import available_memory
from tiermoe.platform.process_memory import ACTIVATIONS_HEAP, resident_bytes
from tiermoe.types import USUAL, MoeLayer, Need, Phase, Use

DEFAULT_CONTEXT = 4096
RESERVE = 512 * MIB  # of the GPU's free memory: matrix libraries, kernels' code, the allocator's fragments
_SHARE_OF_FREE = 0.8
_EVERYTHING = 1 << 62  # bytes: more than any model's experts
_VARIES = 4 * MIB  # by how much the interpreter's size differs from run to run


def plan_memory(blueprint: Blueprint, resolved: Resolved, store: Store | None, use: Use = USUAL) -> MemoryPlan:
    """Divides the memory budget of `resolved.settings`. store: the checkpoint's, as it is (`found_store`). use: of the
    engine. BudgetError, with the numbers and the nearest setting that would do, where the needs and one layer's experts
    do not fit."""
    settings, composition = resolved.settings, resolved.composition
    device = resolve_device(settings.device)
    require_device(composition, device.partition(":")[0])
    _check_options(blueprint, resolved)
    _check_kv_bits(blueprint, settings, device)
    _check_kv_memory(blueprint, settings, use, device)
    gpu = gpu_budget(settings, device)  # first: it starts CUDA, which the interpreter's size includes
    budget, source = memory_budget(settings)
    model = PlanInputs(
        blueprint, resolved, formats_of(blueprint, resolved), context_of(blueprint, settings),
        device, resident_bytes(), store, use,
    )  # fmt: skip
    sizes = {bits: max(form.slot.nbytes for form in forms) for bits, forms in model.formats.items()}
    wanted = cache_bytes(composition, settings.cache or CacheSize(fraction=1.0), shape_of(blueprint.layers), sizes)
    needs = while_running(model)
    tight = budget - total(needs, Phase.RUNNING) < wanted
    on_disk = embedding_bytes(blueprint) if gpu is None and (tight or blueprint.comes_quantized) else 0
    if on_disk:
        needs.append(Need("dense", -on_disk, Phase.RUNNING, "the embedding on disk"))
    idle = ACTIVATIONS_HEAP if gpu is None and budget - total(needs, Phase.RUNNING) - wanted >= ACTIVATIONS_HEAP else 0
    needs.append(Need("activations", idle, Phase.RUNNING, "what may lie idle between them"))
    packers, packing = while_packing(model, budget)
    needs += packing + while_loading(model, on_disk)
    base = MemoryPlan(
        budget,
        source,
        tuple(needs),
        slot_bytes=sizes[resolved.precisions[0]],
        slots=0,
        all_slots=sum(layer.experts for layer in blueprint.layers),
        layer_slots=max(layer.top_k for layer in blueprint.layers),
        token_slots=sum(layer.top_k for layer in blueprint.layers),
        context=model.context,
        dense_bits=_dense_bits(blueprint, settings.dense_bits_used, device),
        embedding_on_disk=on_disk > 0,
        looked_up=0 if on_disk else embedding_bytes(blueprint),
        kv_bits=settings.kv_bits,
        kv_memory=use.kv_memory,
        packers=packers,
        idle_activations=idle,
        types=blueprint.own_types(),
    )
    if gpu is None:
        plan = _divided(base, wanted, model, sizes)
        if holds_everything(plan, resolved) and composition.unit == "expert":
            plan = replace(plan, unless_mapped=plan.looked_up)
        no_gpu = [resolved.no_gpu] if resolved.no_gpu else []
        plan.warnings.extend(no_gpu + _warnings(plan) + _left_out(blueprint) + _slow_gate(blueprint))
        return plan
    on_gpu = divided_with_gpu(base, wanted, resolved, sizes, device, gpu)
    on_gpu.warnings.extend(_left_out(blueprint))
    return on_gpu


def holds_everything(plan: MemoryPlan, resolved: Resolved) -> bool:
    """Whether every expert is read from the drive once: all have slots, in one precision."""
    everything = plan.slots >= plan.all_slots and len(resolved.precisions) == 1
    return everything and resolved.composition.store == "disk"


def _check_options(blueprint: Blueprint, resolved: Resolved) -> None:
    """ConfigError for an option that would do nothing for this family."""
    prefetch = resolved.composition.prefetch
    if not blueprint.family.forecasts and PREDICTIONS[prefetch].asks_routers:
        raise ConfigError(
            f"prefetch={prefetch} does not apply to {blueprint.family.name}: its routers cannot be asked about another "
            f"layer's input; use --set prefetch=path or none"
        )
    if not blueprint.family.encodes:
        return
    if resolved.settings.chunk != Settings().chunk:
        raise ConfigError(f"chunk does not apply to {blueprint.family.name}: an encoder reads its prompt at once")


def _check_kv_bits(blueprint: Blueprint, settings: Settings, device: str) -> None:
    """ConfigError if keys and values have 16 bits alone."""
    if settings.kv_bits == 16:
        return
    option = f"kv_bits={settings.kv_bits}"
    layers = layers_for(option, "--kv-bits", "has 16 bits", blueprint, settings, device, on_gpu=True)
    if any(isinstance(each.sizes, LatentSizes | CompressedSizes) for each in layers):
        raise ConfigError(
            f"{option} does not apply to {blueprint.family.name}: its cache holds latents, which are compressed "
            f"already; leave --kv-bits out"
        )
    shapes = [each.sizes.shape for each in layers]
    columns = {each.key_columns for each in shapes} | {each.value_columns for each in shapes}
    if settings.kv_bits == 4 and (odd := sorted(each for each in columns if each % COLUMNS_OF_4)):
        raise ConfigError(
            f"{option} takes heads of a multiple of {COLUMNS_OF_4} columns, and {blueprint.family.name} has heads of "
            f"{odd[0]}; use --kv-bits 8"
        )


def _check_kv_memory(blueprint: Blueprint, settings: Settings, use: Use, device: str) -> None:
    """ConfigError if the memory that sequences share for keys and values holds no sequence of the whole context, or
    they share none."""
    if use.kv_memory is None:
        return
    option = f"--kv-memory {format_size(use.kv_memory)}"
    layers_for(option, "--kv-memory", "takes its memory by itself", blueprint, settings, device)
    context = context_of(blueprint, settings)
    longest = longest_request(blueprint, settings, context, device)
    assert longest is not None
    if longest > use.kv_memory:
        raise ConfigError(
            f"{option} holds no request of {context:,} tokens, which takes {format_size(longest)}; raise it to "
            f"{-(-longest // KIB)}KiB, or lower --context"
        )


def context_of(blueprint: Blueprint, settings: Settings) -> int:
    """Tokens to reserve key/value memory for. ConfigError for more than the model was made for."""
    longest = blueprint.max_context()
    if settings.context is not None:
        if longest is not None and settings.context > longest:
            raise ConfigError(
                f"a context of {settings.context:,} tokens is more than the {longest:,} that the model was made for; "
                f"lower --context"
            )
        return settings.context
    return min(DEFAULT_CONTEXT, longest) if longest else DEFAULT_CONTEXT


def shape_of(layers: Sequence[MoeLayer]) -> ModelShape:
    """The shape of a model's MoE layers for compositions; an encoder's layers run first."""
    return ModelShape(
        experts=tuple(layer.experts for layer in layers),
        top_k=tuple(layer.top_k for layer in layers),
        encoder_layers=sum(layer.name.startswith("encoder.") for layer in layers),
    )


def _divided(base: MemoryPlan, wanted: int, model: PlanInputs, sizes: Mapping[int, int]) -> MemoryPlan:
    """The plan with slots from the rest of the budget, of at most `wanted` bytes."""
    room = min(base.budget - base.fixed, wanted)
    least = least_room(base, model.resolved, sizes, whole_slots=False)
    if room < least:
        _refuse(base, model, wanted, least)
    _check_phases(base)
    pools = planned_slots(room, model.resolved, sizes, base.all_slots, whole_slots=False)
    slots = sum(pool.slots for pool in pools)
    if model.resolved.composition.cache == "all" and slots < base.all_slots:
        raise BudgetError(
            f"the preset keeps all {base.all_slots} experts in memory, {slots} fit; "
            f"raise --memory by {wanted - room:,} bytes or use another preset"
        )
    plan = replace(base, slots=slots, pools=pools)
    chunks, chunk_bytes = prompt_chunks(model, slots, base.slot_bytes, plan.budget - plan.total)
    plan = replace(plan, prompt_chunks=chunks, chunk_bytes=chunk_bytes)
    tokens, beyond = of_large_steps(model) if len(pools) == 1 and not model.resolved.settings.cache else (0, 0)
    # From `token_slots` on the cache is a pool a layer, and a pool cannot lend its last `layer_slots`. A plan of fewer
    # slots stays below, or `more` would exceed what the pools can lend; and below `all_slots`, which are no cache.
    most = base.token_slots if slots < base.token_slots else base.all_slots
    more = min(min(beyond, wanted - room) // base.slot_bytes, most - 1 - slots)
    if more <= 0:
        return plan
    pools = planned_slots(room + more * base.slot_bytes, model.resolved, sizes, base.all_slots, whole_slots=False)
    more = sum(pool.slots for pool in pools) - slots
    lent = Need("activations", -more * base.slot_bytes, Phase.RUNNING, "of large steps, slots until one comes")
    needs = (*base.needs, lent)
    return replace(plan, slots=slots + more, pools=pools, needs=needs, large_step=tokens, step_slots=more)


def memory_budget(settings: Settings) -> tuple[int, str]:
    """(bytes, source for people) of the main memory that the settings name, else most of what this machine has free."""
    if settings.memory is not None:
        return settings.memory, "--memory"
    free, source = available_memory()
    return int(free * _SHARE_OF_FREE) + resident_bytes(), f"{_SHARE_OF_FREE:.0%} of the {format_size(free)} {source}"


def _dense_bits(blueprint: Blueprint, bits: int, device: str) -> str:
    if bits == 16 and (own := own_linears(blueprint, device)):
        return f"16, or as the file has them ({types_of(blueprint, own.values())})"
    more = ", ".join(f"{kind} {own}" for kind, own in sorted(recipe(blueprint, bits).items()))
    return f"{bits} ({more})" if more else str(bits)


def _warnings(plan: MemoryPlan) -> list[str]:
    if plan.slots < plan.all_slots and plan.slots < plan.token_slots:
        return [
            f"the cache holds {plan.slots} experts, one token uses {plan.token_slots}: an LRU cache of that size "
            f"hits almost never; from {format_size(plan.fixed + plan.token_slots * plan.slot_bytes)} on it does"
        ]
    return []


def _left_out(blueprint: Blueprint) -> list[str]:
    """Warnings of parts of a checkpoint that do not run."""
    found = []
    if blueprint.config.unread:
        found.append(f"only the text part of this model runs: it does not read {blueprint.config.unread}")
    if blueprint.own_code:
        found.append(
            f"{blueprint.own_code} of this model names code of the model's own, which does not run: transformers' code "
            f"for its family does"
        )
    return found


def _slow_gate(blueprint: Blueprint) -> list[str]:
    """The warning of a gate that no kernel computes, of a model whose other operations kernels compute."""
    if blueprint.dtype != torch.bfloat16 or not native.available():
        return []
    stored = blueprint.outline.gate
    slow = slow_gate(None if stored is None else gate_named(*stored))
    return [slow] if slow else []


def gpu_budget(settings: Settings, device: str) -> tuple[int, str] | None:
    """(bytes, source for people) of a GPU's budget; None for the CPU. ConfigError for a budget of a GPU that is not
    used, BudgetError if the GPU has less free."""
    if device == "cpu":
        if settings.gpu_memory is not None:
            raise ConfigError("--gpu-memory was given, but the model runs on the CPU; leave it out")
        return None
    free = free_memory(device)
    if settings.gpu_memory is None:
        return max(free - RESERVE, 0), f"the {format_size(free)} that {device} has free, less a reserve"
    if settings.gpu_memory > free:
        raise BudgetError(
            f"{device} has {format_size(free)} free, {format_size(settings.gpu_memory)} are asked for; "
            f"use --gpu-memory {free // MIB}MiB or less, or end other programs on it"
        )
    return settings.gpu_memory, "--gpu-memory"


def divided_with_gpu(
    base: MemoryPlan, wanted: int, resolved: Resolved, sizes: Mapping[int, int], device: str, gpu: tuple[int, str]
) -> GpuMemoryPlan:
    """The plan for a GPU, with warnings. wanted: bytes of --cache. sizes: precision → bytes of a slot. gpu: the GPU's
    budget. Main memory has pinned slots, a cache where the GPU does not hold all experts. BudgetError, with the
    numbers, where one of the two budgets is too small."""
    parts = {name: getattr(base, name) for name in MemoryPlan.__dataclass_fields__ if name != "warnings"}
    empty = GpuMemoryPlan(**parts, device=device, gpu_budget=gpu[0], gpu_budget_source=gpu[1])
    room = min(empty.gpu_budget - empty.gpu_fixed, wanted)
    least = least_room(empty, resolved, sizes, whole_slots=True)
    if room < least:
        raise _gpu_too_small(empty, wanted, least)
    pools = planned_slots(room, resolved, sizes, base.all_slots, whole_slots=True)
    plan = replace(empty, slots=sum(pool.slots for pool in pools), pools=pools)
    holds_all = pools == planned_slots(_EVERYTHING, resolved, sizes, base.all_slots, whole_slots=True)
    host_room = 0 if holds_all else plan.budget - plan.fixed  # a thread reads into a pinned slot in any case
    lanes = few_lanes(resolved.settings)
    plan = replace(plan, host_pools=planned_slots(host_room, resolved, sizes, base.all_slots, True, lanes))
    if plan.total > plan.budget:
        raise BudgetError(
            f"{format_size(plan.budget)} of main memory are too little: interpreter {format_size(plan.interpreter)}, "
            f"staging {format_size(plan.staging)} and {plan.host_slots} pinned experts "
            f"{format_size(plan.host_experts)}. Use --memory {_mebibytes(plan.total)} or more"
        )
    _check_phases(plan)
    plan.warnings.extend(_gpu_warnings(plan, holds_all))
    return plan


def _gpu_too_small(plan: GpuMemoryPlan, wanted: int, least: int) -> BudgetError:
    """The error for a GPU whose room for experts, or the wanted cache, is less than the `least` bytes of one layer."""
    if wanted < least:
        return BudgetError(
            f"a cache of {wanted // plan.slot_bytes} experts cannot hold the {plan.layer_slots} that one layer "
            f"uses for a token; the smallest --cache is {format_size(least)}"
        )
    needed = plan.gpu_fixed + least
    return BudgetError(
        f"{format_size(plan.gpu_budget)} on {plan.device} are too little: dense "
        f"{format_size(plan.dense)}, kv cache {format_size(plan.kv_cache)}, activations "
        f"{format_size(plan.activations)} and one layer's {plan.layer_slots} experts "
        f"{format_size(least)} need {format_size(needed)}. Use --gpu-memory {-(-needed // MIB)}MiB "
        f"or more, or a smaller --context, --chunk or --dense-bits, or --device cpu"
    )


def _gpu_warnings(plan: GpuMemoryPlan, holds_all: bool) -> list[str]:
    """Weaknesses of a plan that fits, for people."""
    warnings = []
    if plan.slots < plan.token_slots:
        enough = plan.gpu_fixed + plan.token_slots * plan.slot_bytes
        warnings.append(
            f"the GPU's cache holds {plan.slots} experts, one token uses {plan.token_slots}: a "
            f"least-recently-used cache of that size hits almost never; from --gpu-memory "
            f"{-(-enough // MIB)}MiB on it does"
        )
    if not holds_all and plan.host_slots <= plan.slots:
        warnings.append(
            f"main memory caches {plan.host_slots} experts, no more than the GPU's {plan.slots}: what the "
            f"GPU lacks comes from disk; more --memory changes that"
        )
    return warnings


def _check_phases(plan: MemoryPlan) -> None:
    """BudgetError if packing or loading takes more than the budget."""
    for phase, happens in ((Phase.PACKING, "packing, once,"), (Phase.LOADING, "loading")):
        needed = total(plan.needs, phase)
        if needed > plan.budget:
            raise BudgetError(
                f"{format_size(plan.budget)} are too little: {happens} needs {format_size(needed)} "
                f"({in_words(plan.needs, phase)}). Use --memory {_mebibytes(needed)} or more"
            )


def _refuse(plan: MemoryPlan, model: PlanInputs, wanted: int, least: int) -> None:
    """BudgetError for a plan without room for the experts that a token uses in a layer, which take `least` bytes, or
    for a cache of `wanted` bytes without."""
    needed = plan.fixed + least
    if wanted < least and needed <= plan.budget:
        raise BudgetError(
            f"a cache of {wanted // plan.slot_bytes} experts cannot hold the {plan.layer_slots} that one layer uses "
            f"for a token; use --cache {-(-least // KIB)}KiB or more"
        )
    raise BudgetError(
        f"{format_size(plan.budget)} are too little: {in_words(plan.needs, Phase.RUNNING)} and one layer's "
        f"{plan.layer_slots} experts {format_size(least)} need {format_size(needed)}. "
        f"Use --memory {_mebibytes(needed)} or more{_cheaper(plan, model, needed)}"
    )


def _cheaper(plan: MemoryPlan, model: PlanInputs, needed: int) -> str:
    """A store on disk, or fewer bits of dense layers, that are enough; else what else would help."""
    settings, resolved = model.settings, model.resolved
    cheaper = {
        f"--dense-bits {bits}": replace(resolved, settings=replace(settings, dense_bits=bits))
        for bits in (8, 4)
        if bits < settings.dense_bits_used
    }
    if resolved.composition.store == "memory":
        on_disk = replace(resolved, composition=replace(resolved.composition, store="disk"))
        cheaper = {"--set store=disk": on_disk} | cheaper
    full = total(while_running(model), Phase.RUNNING)
    for option, fewer in cheaper.items():
        saved = full - total(while_running(replace(model, resolved=fewer)), Phase.RUNNING)
        if needed - saved <= plan.budget:
            return f", or {option}, which saves {format_size(saved)}"
    if settings.context is None or settings.context > 512:
        return ", or a smaller --context, --chunk or --dense-bits"
    return ""


def _mebibytes(nbytes: int) -> str:
    """As an option's value, with what the interpreter's size varies by."""
    return f"{-(-(nbytes + _VARIES) // MIB)}MiB"
