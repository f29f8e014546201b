"""What `tiermoe plan` says: the plan of a model that may not be here yet, what will compute, what to expect."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiermoe.config import Settings
from tiermoe.decide.composition import Composition
from tiermoe.decide.eviction import EVICTIONS
from tiermoe.decide.reuse import SizeCurve
from tiermoe.engine.load import plan_for, resolve_for
from tiermoe.engine.what_runs import Runs, what_runs
from tiermoe.kernels import machine_layout
from tiermoe.memory.expectation import Expectation, LayerWork, Work, expect
from tiermoe.memory.memory_plan import GpuMemoryPlan, MemoryPlan
from tiermoe.memory.needs import formats_of
from tiermoe.memory.other_budgets import OtherBudget, at_slots, other_budgets
from tiermoe.model.blueprint import Blueprint
from tiermoe.model.dense import kind_of, packable, packed_bytes
from tiermoe.model.own_linears import own_bytes
from tiermoe.model.prepare_store import found_store
from tiermoe.model.remote import Download, inspect_without_download
from tiermoe.simulate.machines import Rates
from tiermoe.store.layout import ExpertFormat
from tiermoe.store.run_record import read_record, record_path
from tiermoe.store.store import precision_key
from tiermoe.systems.resolved import Resolved
from tiermoe.tiers.cuda import resolve_device


@dataclass(frozen=True, slots=True)
class Preview:
    """download: what is fetched first, None where all is here. to_pack: bytes that packing the experts writes, 0 where
    nothing is packed any more. expectation: None where there is none, for the reason in `unknown`. found: what the last
    run of this checkpoint in this precision says of this plan, and of other budgets; None and empty where none has
    said."""

    plan: MemoryPlan
    download: Download | None
    to_pack: int
    runs: Runs
    expectation: Expectation | None
    unknown: str
    found: OtherBudget | None = None
    other_budgets: Sequence[OtherBudget] = ()


def preview(
    model: str | os.PathLike[str], settings: Settings, rates: Callable[[ExpertFormat | None], Rates]
) -> Preview:
    """Of a model on a machine of these rates, which are asked for when everything else is known: with the format of
    experts that torch's operators compute, None where compiled kernels do. ModelError as
    `inspect_without_download`, BudgetError as `plan_memory`."""
    blueprint, download = inspect_without_download(model, settings.store)
    plan = plan_for(blueprint, settings)
    resolved = resolve_for(blueprint, settings)
    runs = what_runs(blueprint, resolved)
    unknown = _unknown(blueprint, resolved.composition, plan)
    expectation = None
    if not unknown:
        try:
            by_torch = _formats(blueprint, resolved)[0] if runs.torch else None
            expectation = expect(work_of(blueprint, resolved, plan, runs.ours), rates(by_torch))
        except OSError as error:
            unknown = f"this machine cannot be measured ({error})"
    to_pack = _expert_bytes(blueprint, resolved) if plan.packing else 0
    curve = _earlier_run(blueprint, resolved)
    found, others = (None, []) if curve is None else (at_slots(plan, curve, plan.slots), other_budgets(plan, curve))
    return Preview(plan, download, to_pack, runs, expectation, unknown, found, others)


def work_of(blueprint: Blueprint, resolved: Resolved, plan: MemoryPlan, ours: bool) -> Work:
    """What a token costs, by the plan and the sizes of the model's matrices."""
    formats, bits = _formats(blueprint, resolved), resolved.settings.dense_bits_used
    _, packed = own_bytes(blueprint, "cpu") if bits == 16 else packed_bytes(blueprint, bits, machine_layout("cpu"))
    moe = [LayerWork(form.layer.experts, form.layer.top_k, form.slot.nbytes, form.stored.nbytes) for form in formats]
    dense = sum(
        math.prod(blueprint.outline.tensors[f"{name}.weight"].shape)
        for name in packable(blueprint)
        if kind_of(name) != "lm_head"  # computed for a prompt's last token alone
    )
    active = dense + sum(layer.top_k * layer.expert_elements for layer in blueprint.layers)
    return Work(
        moe=moe,
        dense_bytes=plan.dense - plan.looked_up,
        kv_bytes=plan.kv_cache / plan.context / resolved.settings.batch,
        operations=2 * active,
        share=plan.slots / plan.all_slots,
        chunk=resolved.settings.chunk,
        context=plan.context,
        layers=int(getattr(blueprint.config, "num_hidden_layers", len(moe))),
        ours=ours,
        packed_bytes=packed,
    )


def _formats(blueprint: Blueprint, resolved: Resolved) -> list[ExpertFormat]:
    return formats_of(blueprint, resolved, machine_layout("cpu"))[resolved.precisions[0]]


def _earlier_run(blueprint: Blueprint, resolved: Resolved) -> SizeCurve | None:
    """What the last run with whole experts in one precision found, for a preset that is exact too."""
    store = found_store(blueprint, resolved.settings.store)
    composition = resolved.composition
    if store is None or composition.lossy or composition.cache not in EVICTIONS:
        return None
    layout = machine_layout(resolve_device(resolved.settings.device))
    key = precision_key(resolved.precisions[0], resolved.settings.quantizer_used, layout, composition.unit)
    return read_record(
        record_path(store.root, key), store.source.fingerprint, [each.experts for each in store.layers]
    ).curve


def _unknown(blueprint: Blueprint, composition: Composition, plan: MemoryPlan) -> str:
    """Why nobody can say what to expect; empty where it can be said."""
    if isinstance(plan, GpuMemoryPlan):
        return "a GPU's rates are not known"
    if blueprint.family.encodes:
        return "a model with an encoder"
    whole = composition.unit == "expert" and composition.routing == "all" and composition.precision == "fixed"
    if not whole or composition.store != "disk" or composition.cache not in {*EVICTIONS, "all"}:
        return f"the preset {composition.name} reads otherwise than the recorded runs"
    return ""


def _expert_bytes(blueprint: Blueprint, resolved: Resolved) -> int:
    formats = formats_of(blueprint, resolved, machine_layout("cpu"))
    return sum(form.stored.nbytes * form.layer.experts for forms in formats.values() for form in forms)
