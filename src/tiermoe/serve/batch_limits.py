"""Limits of a server's batch: how many requests run at once, their memory, and the folder that keeps their prefixes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tiermoe.config import Settings, format_size
from tiermoe.engine.budget import context_of
from tiermoe.engine.load import plans_for, resolve_for
from tiermoe.engine.memory_plan import MemoryPlan
from tiermoe.engine.needs import longest_request, sizes_for
from tiermoe.engine.request_loop import use_of
from tiermoe.errors import BudgetError
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.prefix_files import PrefixFolder, check_size
from tiermoe.offload.cuda import resolve_device
from tiermoe.serve.intake import requests_bytes
from tiermoe.types import Use

MOST_AT_ONCE = 16
_SHARE = 4  # experts have so many times the memory of keys and values


def use_of_server(blueprint: Blueprint, asked: Settings) -> Use:
    """A server's use of the memory plan, without KV memory."""
    context = context_of(blueprint, resolve_for(blueprint, asked).settings)
    return replace(use_of(blueprint.config.vocab_size, asked.chunk), requests=requests_bytes(context))


def with_room(blueprint: Blueprint, asked: Settings, use: Use, note: Callable[[str], None]) -> tuple[Settings, Use]:
    """Settings and use that a server runs with, where no batch is named.

    16 requests run at once and share the KV memory of as many of the longest as experts can do without; one runs where
    memory is too little for more. Where transformers' code keeps keys and values, which are not shared, as many of the
    longest run at once. note: called with a line where they are fewer than 16."""
    used = resolve_for(blueprint, asked).settings
    context = context_of(blueprint, used)
    longest = longest_request(blueprint, used, context, resolve_device(used.device))

    def of(count: int) -> tuple[Settings, Use]:
        if longest is None:
            return replace(asked, batch=count), use
        return replace(asked, batch=MOST_AT_ONCE), replace(use, kv_memory=count * longest)

    plan_of = plans_for(blueprint, asked)

    def plan_for(count: int) -> MemoryPlan:
        settings, needed = of(count)
        return plan_of(settings.batch, needed)

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
    """The most of 16, 8, 4 and 2 requests that leave memory for all experts, or whose keys and values take no more than
    a quarter of what experts have; else 1.

    plan_for: the plan for the KV memory of so many of the longest requests; BudgetError where it does not fit."""
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


def prefix_folder(root: Path, most: int, blueprint: Blueprint, asked: Settings) -> PrefixFolder:
    """The folder `root`, of at most `most` bytes, for the prefixes of a model's conversations.

    ConfigError where it cannot be used, one conversation does not fit, or the model's KV cache has no form on disk:
    before minutes of loading."""
    used = resolve_for(blueprint, asked).settings
    option, device = "--prefix-disk", resolve_device(used.device)
    sizes = sizes_for(option, option, "has no form on disk", blueprint, used, device)
    shapes, context = [each.shape for each in sizes], context_of(blueprint, used)
    check_size(most, shapes, context, min(used.chunk, context), blueprint.dtype.itemsize, used.kv_bits)
    return PrefixFolder(root, most)
