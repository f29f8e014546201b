"""What other budgets than a plan's would bring, by what a run has found."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiermoe.decide.reuse import SizeCurve
from tiermoe.memory.memory_plan import GpuMemoryPlan, MemoryPlan

_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class OtherBudget:
    """`memory_bytes` of main memory give `slots` experts a slot, `cache_fraction` of them all. `hit_rate`: of a decoded
    token's experts those that would be there; `decode_tok_s`: tokens a second."""

    memory_bytes: int
    slots: int
    cache_fraction: float
    hit_rate: float
    decode_tok_s: float


def other_budgets(plan: MemoryPlan, curve: SizeCurve) -> list[OtherBudget]:
    """By rising memory: room for a tenth of the experts, two tenths, … all, and the plan's own. Where a GPU holds the
    experts there are none."""
    if isinstance(plan, GpuMemoryPlan):
        return []
    counts = {math.ceil(share * plan.all_slots) for share in _SHARES}
    enough = {slots for slots in counts if slots >= plan.token_slots}  # fewer are one pool, which hits otherwise
    return [at_slots(plan, curve, slots) for slots in sorted({*enough, plan.slots})]


def at_slots(plan: MemoryPlan, curve: SizeCurve, slots: int) -> OtherBudget:
    """The budget that gives `slots` experts a slot beside what the plan needs for all else."""
    hit_rate, tok_s = curve.at(slots)
    nbytes = plan.fixed + slots * plan.slot_bytes
    return OtherBudget(nbytes, slots, slots / plan.all_slots, hit_rate, tok_s)
