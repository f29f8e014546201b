"""Budgets that are too little, in words: the numbers, and the nearest setting that would do."""

from __future__ import annotations

from dataclasses import replace

from tiermoe.config import KIB, MIB, format_size
from tiermoe.errors import BudgetError
from tiermoe.memory.memory_plan import MemoryPlan, in_words, total
from tiermoe.memory.needs import Inputs, while_running
from tiermoe.types import Phase

_VARIES = 4 * MIB  # by how much the interpreter's size differs from run to run


def check_phases(plan: MemoryPlan) -> None:
    """BudgetError where packing or loading takes more than the budget."""
    for phase, happens in ((Phase.PACKING, "packing, once,"), (Phase.LOADING, "loading")):
        needed = total(plan.needs, phase)
        if needed > plan.budget:
            raise BudgetError(
                f"{format_size(plan.budget)} are too little: {happens} needs {format_size(needed)} "
                f"({in_words(plan.needs, phase)}). Use --memory {mebibytes(needed)} or more"
            )


def refuse(plan: MemoryPlan, model: Inputs, wanted: int, least: int) -> None:
    """BudgetError for a plan without room for the experts that a token uses in a layer, which take `least` bytes, or
    for a cache of `wanted` bytes without."""
    needed = plan.fixed + least
    if wanted < least and needed <= plan.budget:
        raise BudgetError(
            f"a cache of {wanted // plan.slot_bytes} experts cannot hold the {plan.layer_slots} that one layer uses "
            f"for a token; use --cache {-(-least // KIB)}KiB or more"
        )
    raise BudgetError(
        f"{format_size(plan.budget)} are too little: {in_words(plan.needs, Phase.RUNNING)} and one layer's "
        f"{plan.layer_slots} experts {format_size(least)} need {format_size(needed)}. "
        f"Use --memory {mebibytes(needed)} or more{_cheaper(plan, model, needed)}"
    )


def _cheaper(plan: MemoryPlan, model: Inputs, needed: int) -> str:
    """A store on disk, or fewer bits of dense layers, that are enough; else what else would help."""
    settings, resolved = model.settings, model.resolved
    cheaper = {
        f"--dense-bits {bits}": replace(resolved, settings=replace(settings, dense_bits=bits))
        for bits in (8, 4)
        if bits < settings.dense_bits_used
    }
    if resolved.composition.store == "memory":
        on_disk = replace(resolved, composition=replace(resolved.composition, store="disk"))
        cheaper = {"--set store=disk": on_disk} | cheaper
    full = total(while_running(model), Phase.RUNNING)
    for option, fewer in cheaper.items():
        saved = full - total(while_running(replace(model, resolved=fewer)), Phase.RUNNING)
        if needed - saved <= plan.budget:
            return f", or {option}, which saves {format_size(saved)}"
    if settings.context is None or settings.context > 512:
        return ", or a smaller --context, --chunk or --dense-bits"
    return ""


def mebibytes(nbytes: int) -> str:
    """As an option's value, with what the interpreter's size varies by."""
    return f"{-(-(nbytes + _VARIES) // MIB)}MiB"
