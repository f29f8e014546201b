"""How many requests run at once where nobody says: as many as leave experts their memory."""

from __future__ import annotations

from collections.abc import Callable

from tiermoe.errors import BudgetError
from tiermoe.memory.memory_plan import MemoryPlan

MOST_AT_ONCE = 16
_SHARE = 4  # experts have so many times the memory of keys and values


def requests_at_once(plan_for: Callable[[int], MemoryPlan]) -> int:
    """The most of 16, 8, 4 and 2 that leave memory for all experts, or whose keys and values take no more than a
    quarter of what experts have; else 1. plan_for: the plan for so many requests; BudgetError where they do not fit."""
    count = MOST_AT_ONCE
    while count > 1:
        try:
            plan = plan_for(count)
        except BudgetError:
            pass
        else:
            if plan.slots >= plan.all_slots or _SHARE * plan.kv_cache <= plan.experts:
                break
        count //= 2
    return count
