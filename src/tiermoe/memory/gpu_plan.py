"""A GPU in the plan: its budget, what lies on it, and main memory as its cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tiermoe.config import MIB, Settings, format_size
from tiermoe.errors import BudgetError, ConfigError
from tiermoe.memory.memory_plan import GpuMemoryPlan, MemoryPlan, SlotPool, slot_pools
from tiermoe.memory.refusals import check_phases, mebibytes
from tiermoe.systems.resolved import Resolved
from tiermoe.tiers.cuda import free_memory
from tiermoe.tiers.disk import LANES

RESERVE = 512 * MIB  # of the GPU's free memory: matrix libraries, kernels' code, the allocator's fragments


def gpu_budget(settings: Settings, device: str) -> tuple[int, str] | None:
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


def divided_with_gpu(
    base: MemoryPlan, wanted: int, resolved: Resolved, sizes: Mapping[int, int], device: str, gpu: tuple[int, str]
) -> GpuMemoryPlan:
    """The plan for a GPU. wanted: bytes asked for by --cache. sizes: precision → bytes of a slot. gpu: its budget.
    BudgetError, with the numbers, where one of the two budgets is too small."""
    parts = {name: getattr(base, name) for name in MemoryPlan.__dataclass_fields__ if name != "warnings"}
    empty = GpuMemoryPlan(**parts, device=device, gpu_budget=gpu[0], gpu_budget_source=gpu[1], host_pools=())
    room = min(empty.gpu_budget - empty.gpu_fixed, wanted)
    _check_gpu(empty, room, wanted)
    pools = slot_pools(room, resolved, sizes, base.all_slots)
    plan = replace(empty, slots=sum(pool.slots for pool in pools), pools=pools)
    plan = replace(plan, host_pools=_host_pools(plan, resolved, sizes))
    if plan.total > plan.budget:
        raise BudgetError(
            f"{format_size(plan.budget)} of main memory are too little: interpreter {format_size(plan.interpreter)}, "
            f"staging {format_size(plan.staging)} and {plan.host_slots} pinned experts "
            f"{format_size(plan.host_experts)}. Use --memory {mebibytes(plan.total)} or more"
        )
    check_phases(plan)
    return plan


def _host_pools(plan: GpuMemoryPlan, resolved: Resolved, sizes: Mapping[int, int]) -> tuple[SlotPool, ...]:
    """Pinned slots: a cache where the GPU does not hold all experts, else and at least one for each lane."""
    holds_all = plan.slots >= plan.all_slots and len(sizes) == 1
    pools = slot_pools(0 if holds_all else plan.budget - plan.fixed, resolved, sizes, plan.all_slots)
    return tuple(replace(pool, slots=max(pool.slots, resolved.settings.lanes or LANES)) for pool in pools)


def _check_gpu(plan: GpuMemoryPlan, room: int, wanted: int) -> None:
    """BudgetError where the GPU's room for experts, or what is wanted of it, does not hold those of a layer."""
    one_layer = plan.layer_slots * plan.slot_bytes
    if room >= one_layer:
        return
    if wanted < one_layer:
        raise BudgetError(
            f"a cache of {wanted // plan.slot_bytes} experts cannot hold the {plan.layer_slots} that one layer "
            f"uses for a token; the smallest --cache is {format_size(one_layer)}"
        )
    needed = plan.gpu_fixed + one_layer
    raise BudgetError(
        f"{format_size(plan.gpu_budget)} on {plan.device} are too little: dense "
        f"{format_size(plan.dense)}, kv cache {format_size(plan.kv_cache)}, activations "
        f"{format_size(plan.activations)} and one layer's {plan.layer_slots} experts "
        f"{format_size(one_layer)} need {format_size(needed)}. Use --gpu-memory {-(-needed // MIB)}MiB "
        f"or more, or a smaller --context, --chunk or --dense-bits, or --device cpu"
    )


def gpu_warnings(plan: GpuMemoryPlan) -> list[str]:
    """What a plan that holds is still bad at, for people."""
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
