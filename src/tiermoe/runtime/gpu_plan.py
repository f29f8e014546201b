"""The memory plan with a GPU: two budgets, its own memory and the machine's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tiermoe.config import MIB, Settings, format_size
from tiermoe.errors import BudgetError, ConfigError
from tiermoe.runtime.composition import Resolved
from tiermoe.runtime.memory_plan import MemoryPlan
from tiermoe.runtime.slot_pools import pools_in
from tiermoe.tiers.cuda import free_memory
from tiermoe.tiers.disk import LANES

RESERVE = 512 * MIB  # of the GPU's free memory: matrix libraries, kernels' code, the allocator's fragments


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemoryPlan(MemoryPlan):
    """On the GPU, within `gpu_budget`: dense weights, key/value cache, activations, `slots` of
    experts. In main memory, within `budget`: interpreter, staging, and `host_slots` pinned slots."""

    device: str
    gpu_budget: int
    gpu_budget_source: str
    host_slots: int

    @property
    def gpu_fixed(self) -> int:
        """Everything on the GPU but the experts."""
        return self.dense + self.kv_cache + self.activations

    @property
    def gpu_total(self) -> int:
        return self.gpu_fixed + self.experts

    @property
    def fixed(self) -> int:
        """Everything in main memory but the experts."""
        return self.interpreter + self.staging

    @property
    def host_experts(self) -> int:
        """Bytes of the pinned slots."""
        return self.host_slots * self.slot_bytes

    @property
    def total(self) -> int:
        """Bytes of main memory."""
        return self.fixed + self.host_experts

    def rows(self) -> list[tuple[str, int, str]]:
        """(what, bytes, note) for people: the GPU's parts, their sum, then those of `total`."""
        budget = f"of {format_size(self.gpu_budget)} ({self.gpu_budget_source})"
        return [
            ("GPU: dense weights", self.dense, "always resident; loaded through main memory"),
            ("GPU: key/value cache", self.kv_cache, f"{self.context} tokens of context"),
            ("GPU: activations", self.activations, "of one prefill chunk"),
            ("GPU: expert cache", self.experts, self._share(self.slots)),
            ("GPU: in all", self.gpu_total, budget),
            ("interpreter and libraries", self.interpreter, "measured in this process"),
            ("staging", self.staging, "reading lanes"),
            ("pinned expert cache", self.host_experts, self._share(self.host_slots)),
        ]

    def _share(self, slots: int) -> str:
        return f"{slots} of {self.all_slots} experts ({slots / self.all_slots:.0%})"


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


def divide(
    base: MemoryPlan, wanted: int, resolved: Resolved, sizes: Mapping[int, int], device: str, gpu: tuple[int, str]
) -> GpuMemoryPlan:
    """The plan for a GPU. base: the sizes of the parts, without slots. wanted: slots asked for by --cache. sizes:
    precision → bytes of a slot; on a GPU all slots are as large as the largest. gpu: its budget. BudgetError, with the
    numbers, where one of the two budgets is too small."""
    base = replace(base, slot_bytes=max(sizes.values()))
    room = gpu[0] - base.dense - base.kv_cache - base.activations
    slots = min(room // base.slot_bytes, wanted, base.all_slots)
    alike = dict.fromkeys(sizes, base.slot_bytes)
    pools = pools_in(slots * base.slot_bytes, resolved, alike, base.all_slots)
    least = resolved.settings.lanes or LANES
    room = base.budget - base.interpreter - base.staging
    host_slots = least if slots == base.all_slots else min(room // base.slot_bytes, base.all_slots)
    parts = {name: getattr(base, name) for name in MemoryPlan.__dataclass_fields__ if name != "warnings"}
    plan = GpuMemoryPlan(
        **parts | {"slots": slots, "pools": pools},
        device=device,
        gpu_budget=gpu[0],
        gpu_budget_source=gpu[1],
        host_slots=max(host_slots, least),
    )
    _check(plan, wanted)
    plan.warnings.extend(_warnings(plan))
    return plan


def _check(plan: GpuMemoryPlan, wanted: int) -> None:
    one_layer = plan.layer_slots * plan.slot_bytes
    if plan.slots < plan.layer_slots:
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
    needed = max(plan.total, plan.interpreter + plan.dense)
    if needed > plan.budget:
        raise BudgetError(
            f"{format_size(plan.budget)} of main memory are too little: interpreter "
            f"{format_size(plan.interpreter)}, with dense weights {format_size(plan.dense)} on their way to "
            f"{plan.device}, later staging {format_size(plan.staging)} and {plan.host_slots} pinned experts "
            f"{format_size(plan.host_experts)}. Use --memory {-(-needed // MIB)}MiB or more"
        )


def _warnings(plan: GpuMemoryPlan) -> list[str]:
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
