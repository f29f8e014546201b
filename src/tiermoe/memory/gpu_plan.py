"""A GPU in the plan: its budget, what lies on it, and main memory as its cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tiermoe.config import MIB, Settings, format_size
from tiermoe.errors import BudgetError, ConfigError
from tiermoe.memory.memory_plan import GpuMemoryPlan, MemoryPlan, slot_pools
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
    pools = slot_pools(slots * size, resolved, dict.fromkeys(sizes, size), base.all_slots)
    plan = replace(empty, slots=slots, pools=pools, host_slots=max(host_slots, least))
    _check_gpu(plan, wanted)
    if plan.total > plan.budget:
        raise BudgetError(
            f"{format_size(plan.budget)} of main memory are too little: interpreter {format_size(plan.interpreter)}, "
            f"staging {format_size(plan.staging)} and {plan.host_slots} pinned experts "
            f"{format_size(plan.host_experts)}. Use --memory {mebibytes(plan.total)} or more"
        )
    check_phases(plan)
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
