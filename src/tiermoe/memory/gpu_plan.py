"""A GPU in the plan: its budget, what lies on it, and main memory as its cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tiermoe.config import MIB, Settings, format_size
from tiermoe.errors import BudgetError, ConfigError
from tiermoe.memory.memory_plan import GpuMemoryPlan, MemoryPlan, least_room, slot_pools
from tiermoe.memory.refusals import check_phases, mebibytes
from tiermoe.systems.resolved import Resolved
from tiermoe.tiers.cuda import free_memory
from tiermoe.tiers.disk import LANES

RESERVE = 512 * MIB  # of the GPU's free memory: matrix libraries, kernels' code, the allocator's fragments
_EVERYTHING = 1 << 62  # bytes: more than any model's experts


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
    """The plan for a GPU, with its warnings. wanted: bytes asked for by --cache. sizes: precision → bytes of a slot.
    gpu: its budget. Main memory has pinned slots, a cache where the GPU does not hold all experts. BudgetError, with
    the numbers, where one of the two budgets is too small."""
    parts = {name: getattr(base, name) for name in MemoryPlan.__dataclass_fields__ if name != "warnings"}
    empty = GpuMemoryPlan(**parts, device=device, gpu_budget=gpu[0], gpu_budget_source=gpu[1])
    room = min(empty.gpu_budget - empty.gpu_fixed, wanted)
    least = least_room(empty, resolved, sizes)
    if room < least:
        raise _too_little(empty, wanted, least)
    pools = slot_pools(room, resolved, sizes, base.all_slots)
    plan = replace(empty, slots=sum(pool.slots for pool in pools), pools=pools)
    holds_all = pools == slot_pools(_EVERYTHING, resolved, sizes, base.all_slots)
    host_room = 0 if holds_all else plan.budget - plan.fixed  # a lane reads into a pinned slot in any case
    lanes = resolved.settings.lanes or LANES
    plan = replace(plan, host_pools=slot_pools(host_room, resolved, sizes, base.all_slots, lanes))
    if plan.total > plan.budget:
        raise BudgetError(
            f"{format_size(plan.budget)} of main memory are too little: interpreter {format_size(plan.interpreter)}, "
            f"staging {format_size(plan.staging)} and {plan.host_slots} pinned experts "
            f"{format_size(plan.host_experts)}. Use --memory {mebibytes(plan.total)} or more"
        )
    check_phases(plan)
    plan.warnings.extend(_warnings(plan, holds_all))
    return plan


def _too_little(plan: GpuMemoryPlan, wanted: int, least: int) -> BudgetError:
    """For a GPU whose room for experts, or what is wanted of it, is less than the `least` bytes that they need."""
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


def _warnings(plan: GpuMemoryPlan, holds_all: bool) -> list[str]:
    """What a plan that holds is still bad at, for people."""
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
