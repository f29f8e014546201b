"""What would go where in the memory budget, computed before anything is loaded: the owners' needs summed, the rest
divided into slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tiermoe.config import KIB, MIB, CacheSize, Settings, format_size
from tiermoe.decide.compose import ModelShape, cache_bytes
from tiermoe.decide.compose import divide as divide_slots
from tiermoe.decide.composition import require_device
from tiermoe.decide.prediction import PREDICTIONS
from tiermoe.errors import BudgetError, ConfigError
from tiermoe.kernels import machine_layout
from tiermoe.memory.activations import decoder_needs, expanding_needs
from tiermoe.memory.memory_plan import GpuMemoryPlan, MemoryPlan, SlotPool, in_words, total
from tiermoe.model.blueprint import Blueprint
from tiermoe.model.dense import dense_bytes, recipe
from tiermoe.model.dense_weights import loading_needs
from tiermoe.model.embedding import embedding_bytes
from tiermoe.model.prepare_store import packing_needs
from tiermoe.process.footprint import resident_bytes
from tiermoe.process.machine import available_memory
from tiermoe.store.layout import ExpertFormat
from tiermoe.store.neurons import unit_format
from tiermoe.systems.resolved import Resolved
from tiermoe.tiers.cuda import free_memory, resolve_device
from tiermoe.tiers.disk import LANES, staging_bytes
from tiermoe.types import MoeLayer, Need, Phase, Workload

DEFAULT_CONTEXT = 4096
RESERVE = 512 * MIB  # of the GPU's free memory: matrix libraries, kernels' code, the allocator's fragments
_FIRST_USE = 46 * MIB  # library code and heap that the first forward pass brings in: 43 MiB measured
_SHARE_OF_FREE = 0.8
_VARIES = 4 * MIB  # by how much the interpreter's size differs from run to run


@dataclass(frozen=True, slots=True)
class _Model:
    """What the needs follow from. process: bytes that the process holds already."""

    blueprint: Blueprint
    resolved: Resolved
    formats: Mapping[int, Sequence[ExpertFormat]]
    context: int
    device: str
    process: int

    @property
    def settings(self) -> Settings:
        return self.resolved.settings

    @property
    def every_format(self) -> list[ExpertFormat]:
        return [form for forms in self.formats.values() for form in forms]


def plan_memory(blueprint: Blueprint, resolved: Resolved) -> MemoryPlan:
    """Divides the budget. BudgetError, with the numbers and the nearest setting that would do, where what must be
    there and one layer's experts do not fit."""
    settings, composition = resolved.settings, resolved.composition
    device = resolve_device(settings.device)
    require_device(composition, device.partition(":")[0])
    _check_options(blueprint, resolved)
    gpu = _gpu_budget(settings, device)  # first: it starts CUDA, which the interpreter's size includes
    budget, source = _budget(settings)
    model = _Model(
        blueprint, resolved, _formats(blueprint, resolved, machine_layout(device)), context_of(blueprint, settings),
        device, resident_bytes(),
    )  # fmt: skip
    sizes = {bits: max(form.slot.nbytes for form in forms) for bits, forms in model.formats.items()}
    wanted = cache_bytes(composition, settings.cache or CacheSize(fraction=1.0), shape_of(blueprint.layers), sizes)
    needs = _running_needs(model)
    on_disk = embedding_bytes(blueprint) if gpu is None and budget - total(needs, Phase.RUNNING) < wanted else 0
    if on_disk:
        needs.append(Need("dense", -on_disk, Phase.RUNNING, "the embedding on disk"))
    packers, packing = _packing(model, budget)
    needs += packing + _loading_needs(model, on_disk)
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
        dense_bits=_dense_bits(blueprint, settings.dense_bits_used, machine_layout(device)),
        embedding_on_disk=on_disk > 0,
        packers=packers,
    )
    if gpu is None:
        plan = _divided(base, wanted, model, sizes)
        plan.warnings.extend(_warnings(plan))
        return plan
    on_gpu = _divided_with_gpu(base, wanted // base.slot_bytes, resolved, sizes, device, gpu)
    on_gpu.warnings.extend(_gpu_warnings(on_gpu))
    return on_gpu


def _check_options(blueprint: Blueprint, resolved: Resolved) -> None:
    """ConfigError for an option that would do nothing for this family."""
    prefetch = resolved.composition.prefetch
    if blueprint.family.adapter and PREDICTIONS[prefetch].asks_routers:
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


def shape_of(layers: Sequence[MoeLayer]) -> ModelShape:
    """A model's MoE layers as compositions see them; those of an encoder run first."""
    return ModelShape(
        experts=tuple(layer.experts for layer in layers),
        top_k=tuple(layer.top_k for layer in layers),
        encoder_layers=sum(layer.name.startswith("encoder.") for layer in layers),
    )


def _formats(blueprint: Blueprint, resolved: Resolved, layout: str) -> dict[int, list[ExpertFormat]]:
    """Precision → the format of each layer's experts."""
    unit, quantizer = resolved.composition.unit, resolved.settings.quantizer
    return {
        bits: [unit_format(unit, layer, bits, blueprint.dtype, layout, quantizer) for layer in blueprint.layers]
        for bits in resolved.precisions
    }


def _running_needs(model: _Model) -> list[Need]:
    """What is held while the model runs, beside the slots of experts: each from its owner."""
    blueprint, settings, formats = model.blueprint, model.settings, model.every_format
    load = Workload(
        model.context, settings.chunk, settings.batch, blueprint.dtype.itemsize,
        settings.threads or torch.get_num_threads(),
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
    ]


def _loading_needs(model: _Model, on_disk: int) -> list[Need]:
    """Onto a GPU too: weights come through main memory."""
    dense = dense_bytes(model.blueprint, model.settings.dense_bits_used, machine_layout(model.device)) - on_disk
    process = Need("interpreter", model.process, Phase.LOADING)
    return [process, *loading_needs(model.blueprint, dense)]


def _packing(model: _Model, budget: int) -> tuple[int, list[Need]]:
    """By how many workers the store is packed, as many as torch has threads and the budget allows, and their needs;
    none where the store lacks nothing."""
    layout = machine_layout(model.device)
    process = Need("interpreter", model.process + _FIRST_USE, Phase.PACKING)
    for workers in range(model.settings.threads or torch.get_num_threads(), 0, -1):
        needs = packing_needs(model.blueprint, model.resolved, layout, workers)
        if not needs:
            return workers, []
        needs = [process, *needs]
        if total(needs, Phase.PACKING) <= budget:
            break
    return workers, needs


def _check_phases(plan: MemoryPlan) -> None:
    """BudgetError where packing or loading takes more than the budget."""
    for phase, happens in ((Phase.PACKING, "packing, once,"), (Phase.LOADING, "loading")):
        needed = total(plan.needs, phase)
        if needed > plan.budget:
            raise BudgetError(
                f"{format_size(plan.budget)} are too little: {happens} needs {format_size(needed)} "
                f"({in_words(plan.needs, phase)}). Use --memory {_mebibytes(needed)} or more"
            )


def _divided(base: MemoryPlan, wanted: int, model: _Model, sizes: Mapping[int, int]) -> MemoryPlan:
    """The plan with the slots that the rest of the budget gives, of `wanted` bytes at the most."""
    room = min(base.budget - base.fixed, wanted)
    if room < base.layer_slots * base.slot_bytes:
        _refuse(base, model, wanted // base.slot_bytes)
    _check_phases(base)
    pools = _pools(room, model.resolved, sizes, base.all_slots)
    slots = sum(pool.slots for pool in pools)
    if model.resolved.composition.cache == "all" and slots < base.all_slots:
        raise BudgetError(
            f"the preset keeps all {base.all_slots} experts in memory, {slots} fit; "
            f"raise --memory by {wanted - room:,} bytes or use another preset"
        )
    return replace(base, slots=slots, pools=pools)


def _pools(room: int, resolved: Resolved, sizes: Mapping[int, int], all_slots: int) -> tuple[SlotPool, ...]:
    """The slots that fit `room` bytes. sizes: precision → bytes of a slot."""
    shares = divide_slots(room, resolved.composition, sizes, resolved.tables.bits.values(), all_slots)
    return tuple(SlotPool(bits, slots, max(sizes[value] for value in bits)) for bits, slots in shares)


def _budget(settings: Settings) -> tuple[int, str]:
    if settings.memory is not None:
        return settings.memory, "--memory"
    free, source = available_memory()
    return int(free * _SHARE_OF_FREE) + resident_bytes(), f"{_SHARE_OF_FREE:.0%} of the {format_size(free)} {source}"


def _dense_bits(blueprint: Blueprint, bits: int, layout: str) -> str:
    more = ", ".join(f"{kind} {own}" for kind, own in sorted(recipe(blueprint, bits, layout).items()))
    return f"{bits} ({more})" if more else str(bits)


def _mebibytes(nbytes: int) -> str:
    """As an option's value, with what the interpreter's size varies by."""
    return f"{-(-(nbytes + _VARIES) // MIB)}MiB"


def _warnings(plan: MemoryPlan) -> list[str]:
    if plan.slots < plan.all_slots and plan.slots < plan.token_slots:
        return [
            f"the cache holds {plan.slots} experts, one token uses {plan.token_slots}: an LRU cache of that size "
            f"hits almost never; from {format_size(plan.fixed + plan.token_slots * plan.slot_bytes)} on it does"
        ]
    return []


def _refuse(plan: MemoryPlan, model: _Model, wanted: int) -> None:
    """BudgetError for a plan without room for the experts that a token uses in a layer, or for a cache without."""
    one_layer = plan.layer_slots * plan.slot_bytes
    needed = plan.fixed + one_layer
    if wanted < plan.layer_slots and needed <= plan.budget:
        raise BudgetError(
            f"a cache of {wanted} experts cannot hold the {plan.layer_slots} that one layer uses for a token; "
            f"use --cache {one_layer // KIB}KiB or more"
        )
    raise BudgetError(
        f"{format_size(plan.budget)} are too little: {in_words(plan.needs, Phase.RUNNING)} and one layer's "
        f"{plan.layer_slots} experts {format_size(one_layer)} need {format_size(needed)}. "
        f"Use --memory {_mebibytes(needed)} or more{_cheaper(plan, model, needed)}"
    )


def _cheaper(plan: MemoryPlan, model: _Model, needed: int) -> str:
    """Fewer bits of dense layers that are enough; else what else would help."""
    settings = model.settings
    full = total(_running_needs(model), Phase.RUNNING)
    for bits in (8, 4):
        if bits < settings.dense_bits_used:
            fewer = replace(model, resolved=replace(model.resolved, settings=replace(settings, dense_bits=bits)))
            saved = full - total(_running_needs(fewer), Phase.RUNNING)
            if needed - saved <= plan.budget:
                return f", or --dense-bits {bits}, which saves {format_size(saved)}"
    if settings.context is None or settings.context > 512:
        return ", or a smaller --context, --chunk or --dense-bits"
    return ""


def _gpu_budget(settings: Settings, device: str) -> tuple[int, str] | None:
    """(bytes, where that number comes from), None for the CPU. ConfigError where a budget is given for a GPU
    that is not used, BudgetError where it has less free than was asked for."""
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


def _divided_with_gpu(
    base: MemoryPlan, wanted: int, resolved: Resolved, sizes: Mapping[int, int], device: str, gpu: tuple[int, str]
) -> GpuMemoryPlan:
    """The plan for a GPU. wanted: slots asked for by --cache. sizes: precision → bytes of a slot; on a GPU all slots
    are as large as the largest. gpu: its budget. BudgetError, with the numbers, where one of the two budgets is too
    small."""
    parts = {name: getattr(base, name) for name in MemoryPlan.__dataclass_fields__ if name != "warnings"}
    size = max(sizes.values())
    empty = GpuMemoryPlan(
        **parts | {"slot_bytes": size}, device=device, gpu_budget=gpu[0], gpu_budget_source=gpu[1], host_slots=0
    )
    slots = min((empty.gpu_budget - empty.gpu_fixed) // size, wanted, base.all_slots)
    least = resolved.settings.lanes or LANES
    host_slots = least if slots == base.all_slots else min((empty.budget - empty.fixed) // size, base.all_slots)
    pools = _pools(slots * size, resolved, dict.fromkeys(sizes, size), base.all_slots)
    plan = replace(empty, slots=slots, pools=pools, host_slots=max(host_slots, least))
    _check_gpu(plan, wanted)
    if plan.total > plan.budget:
        raise BudgetError(
            f"{format_size(plan.budget)} of main memory are too little: interpreter {format_size(plan.interpreter)}, "
            f"staging {format_size(plan.staging)} and {plan.host_slots} pinned experts "
            f"{format_size(plan.host_experts)}. Use --memory {_mebibytes(plan.total)} or more"
        )
    _check_phases(plan)
    return plan


def _check_gpu(plan: GpuMemoryPlan, wanted: int) -> None:
    """BudgetError where the GPU does not hold what it must."""
    if plan.slots >= plan.layer_slots:
        return
    one_layer = plan.layer_slots * plan.slot_bytes
    if wanted < plan.layer_slots:
        raise BudgetError(
            f"a cache of {wanted} experts cannot hold the {plan.layer_slots} that one layer uses for a "
            f"token; the smallest --cache is {format_size(one_layer)}"
        )
    needed = plan.gpu_fixed + one_layer
    raise BudgetError(
        f"{format_size(plan.gpu_budget)} on {plan.device} are too little: dense "
        f"{format_size(plan.dense)}, kv cache {format_size(plan.kv_cache)}, activations "
        f"{format_size(plan.activations)} and one layer's {plan.layer_slots} experts "
        f"{format_size(one_layer)} need {format_size(needed)}. Use --gpu-memory {-(-needed // MIB)}MiB "
        f"or more, or a smaller --context, --chunk or --dense-bits, or --device cpu"
    )


def _gpu_warnings(plan: GpuMemoryPlan) -> list[str]:
    warnings = []
    if plan.slots < plan.all_slots and plan.slots < plan.token_slots:
        enough = plan.gpu_fixed + plan.token_slots * plan.slot_bytes
        warnings.append(
            f"the GPU's cache holds {plan.slots} experts, one token uses {plan.token_slots}: a "
            f"least-recently-used cache of that size hits almost never; from --gpu-memory "
            f"{-(-enough // MIB)}MiB on it does"
        )
    if plan.slots < plan.all_slots and plan.host_slots <= plan.slots:
        warnings.append(
            f"main memory caches {plan.host_slots} experts, no more than the GPU's {plan.slots}: what the "
            f"GPU lacks comes from disk; more --memory changes that"
        )
    return warnings
