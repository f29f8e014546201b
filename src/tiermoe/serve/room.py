"""What a server asks of an engine: how many requests run at once, and the memory for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tiermoe.config import Settings, format_size
from tiermoe.engine.load import plans_for, resolve_for
from tiermoe.errors import BudgetError
from tiermoe.memory.activations import longest_request
from tiermoe.memory.memory_plan import MemoryPlan
from tiermoe.memory.plan import context_of
from tiermoe.model.blueprint import Blueprint
from tiermoe.serve.intake import requests_bytes
from tiermoe.serve.scoring import use_of
from tiermoe.tiers.cuda import resolve_device
from tiermoe.types import Use

MOST_AT_ONCE = 16
_SHARE = 4  # experts have so many times the memory of keys and values


def use_of_server(blueprint: Blueprint, asked: Settings) -> Use:
    """Without memory for keys and values of its own."""
    context = context_of(blueprint, resolve_for(blueprint, asked).settings)
    return replace(use_of(blueprint.config.vocab_size, asked.chunk), requests=requests_bytes(context))


def with_room(blueprint: Blueprint, asked: Settings, use: Use, note: Callable[[str], None]) -> tuple[Settings, Use]:
    """What a server runs with: 16 requests at once that share what so many of the longest take as experts can do
    without, or one where memory is too little for more. Where transformers' code keeps keys and values, which are not
    shared, so many of the longest run at once. note: told where that is fewer than 16."""
    used = resolve_for(blueprint, asked).settings
    context = context_of(blueprint, used)
    longest = longest_request(blueprint, used, context, resolve_device(used.device))

    def of(count: int) -> tuple[Settings, Use]:
        if longest is None:
            return replace(asked, batch=count), use
        return replace(asked, batch=MOST_AT_ONCE), replace(use, kv_memory=count * longest)

    plan_of = plans_for(blueprint, asked)

    def plan_for(count: int) -> MemoryPlan:
        chosen, its = of(count)
        return plan_of(chosen.batch, its)

    count = requests_at_once(plan_for)
    if longest is None:
        if count < MOST_AT_ONCE:
            note(
                f"note: requests that run at once: {count}; keys and values of {2 * count} would leave experts too "
                f"little memory; --max-batch names another number, --context fewer tokens for each"
            )
        return of(count)
    if count == 1:
        try:
            plan_for(1)
        except BudgetError:
            return replace(asked, batch=1), use
    if count < MOST_AT_ONCE:
        note(
            f"note: keys and values of all requests: {format_size(count * longest)}, what {count} of {context:,} "
            f"tokens take; experts have the rest; --kv-memory names another size, --context fewer tokens for each"
        )
    return of(count)


def requests_at_once(plan_for: Callable[[int], MemoryPlan]) -> int:
    """The most of 16, 8, 4 and 2 that leave memory for all experts, or whose keys and values take no more than a
    quarter of what experts have; else 1. plan_for: the plan for the memory of so many of the longest requests;
    BudgetError where it does not fit."""
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
