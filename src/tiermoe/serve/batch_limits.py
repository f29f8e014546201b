"""Limits of a server's batch: how many requests run at once, their memory, and the folder that keeps their prefixes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tiermoe.config import MIB, Settings, format_size
from tiermoe.engine.budget import context_of, plan_memory
from tiermoe.engine.load import plan_for, plans_for, resolve_for
from tiermoe.engine.memory_plan import GpuMemoryPlan, MemoryPlan
from tiermoe.engine.needs import layers_for, longest_request
from tiermoe.engine.request_loop import use_of
from tiermoe.errors import BudgetError, ConfigError
from tiermoe.model.cache.prefix_disk import PrefixFolder, check_size
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.prepare_store import found_store
from tiermoe.offload.cuda import resolve_device
from tiermoe.serve.intake import requests_bytes
from tiermoe.types import Use

MOST_AT_ONCE = 16
_SHARE = 4  # experts have so many times the memory of keys and values
_UNBOUNDED = 1 << 50  # bytes of a budget that nothing exceeds
_VARIES = 16 * MIB  # by how much a server's process differs from the one that plans


def use_of_server(blueprint: Blueprint, asked: Settings) -> Use:
    """A server's use of the memory plan, without KV memory."""
    context = context_of(blueprint, resolve_for(blueprint, asked).settings)
    return replace(use_of(blueprint.config.vocab_size, asked.chunk), requests=requests_bytes(context))


def require_decoder(blueprint: Blueprint) -> None:
    """ConfigError for a model with an encoder."""
    if blueprint.family.encoder_decoder:
        raise ConfigError(
            f"{blueprint.name} is an encoder–decoder model, which serve does not answer with; use tiermoe run"
        )


def as_served(
    blueprint: Blueprint, asked: Settings, batch_named: bool, kv_memory: int | None, note: Callable[[str], None]
) -> tuple[Settings, Use]:
    """Settings and use that a server runs with. batch_named: `asked` has the number of requests that run at once.
    kv_memory, note: bytes of the KV cache, if they are named, else as of `with_room`."""
    use = use_of_server(blueprint, asked)
    if kv_memory is None:
        return (asked, use) if batch_named else with_room(blueprint, asked, use, note)
    return replace(asked, batch=asked.batch if batch_named else MOST_AT_ONCE), replace(use, kv_memory=kv_memory)


def with_room(blueprint: Blueprint, asked: Settings, use: Use, note: Callable[[str], None]) -> tuple[Settings, Use]:
    """Settings and use that a server runs with, where no batch is named.

    16 requests run at once and share the KV memory of as many of the longest as experts can do without; one runs where
    memory is too little for more. Where keys and values are not shared, by transformers' code and on a GPU, as many of
    the longest run at once. note: called with a line if they are fewer than 16."""
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

    plan_for: the plan for the KV memory of so many of the longest requests; BudgetError if it does not fit."""
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


@dataclass(frozen=True, slots=True)
class BudgetRange:
    """What a server of a model can do with a memory budget, in bytes."""

    least: int  # from here on it runs
    enough: int  # from here on its cache holds the experts of a token, and can hit
    most: int  # beyond that it has no use for more
    context: int  # tokens of a request, at most
    on_gpu: bool  # the model runs on a GPU


def budget_range(blueprint: Blueprint, asked: Settings, batch_named: bool, kv_memory: int | None) -> BudgetRange:
    """The budgets that a server of a model can use, by its plans. batch_named, kv_memory: as of `as_served`. Whatever
    `plan_memory` raises where no budget is enough."""

    def served(memory: int) -> tuple[Settings, Use]:
        return as_served(blueprint, replace(asked, memory=memory), batch_named, kv_memory, lambda line: None)

    largest = plan_for(blueprint, *served(_UNBOUNDED))
    settings, use = served(1)
    resolved, store = resolve_for(blueprint, settings), found_store(blueprint, settings.store)

    def plan_of(mebibytes: int) -> MemoryPlan:
        bounded = replace(resolved.settings, memory=mebibytes * MIB)
        return plan_memory(blueprint, replace(resolved, settings=bounded), store, use)

    def fits(mebibytes: int) -> bool:
        try:
            plan_of(mebibytes)
        except BudgetError:
            return False
        return True

    most = max(largest.total, largest.loading)
    least = bisect_left(range(most // MIB + 1), True, lo=1, key=fits)
    small = plan_of(least)
    enough = max(least * MIB, small.fixed + small.token_slots * small.slot_bytes)
    return BudgetRange(
        least * MIB + _VARIES, enough + _VARIES, max(most, enough) + _VARIES, largest.context,
        isinstance(largest, GpuMemoryPlan),
    )  # fmt: skip


def prefix_folder(root: Path, most: int, blueprint: Blueprint, asked: Settings) -> PrefixFolder:
    """The folder `root`, of at most `most` bytes, for the prefixes of a model's conversations.

    ConfigError if it cannot be used, one conversation does not fit, or the model's KV cache has no form on disk:
    before minutes of loading."""
    used = resolve_for(blueprint, asked).settings
    option, device = "--prefix-disk", resolve_device(used.device)
    layers = layers_for(option, option, "has no form on disk", blueprint, used, device)
    shapes, context = [each.sizes.shape for each in layers], context_of(blueprint, used)
    check_size(most, shapes, context, min(used.chunk, context), blueprint.dtype.itemsize, used.kv_bits)
    return PrefixFolder(root, most)
