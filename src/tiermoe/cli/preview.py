"""Preview of a model for `tiermoe plan`: the memory plan of a model that may not be downloaded yet, what will compute
it, and the speed to expect. Importing this module imports torch."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tiermoe.cli.describe import Backend, backend_of
from tiermoe.config import CALIBRATED, Settings
from tiermoe.engine.expectation import (
    Expectation,
    LayerWork,
    OtherBudget,
    Range,
    Work,
    as_measured,
    at_slots,
    expect,
    other_budgets,
)
from tiermoe.engine.load import plan_for, resolve_for
from tiermoe.engine.memory_plan import GpuMemoryPlan, MemoryPlan
from tiermoe.engine.needs import formats_of
from tiermoe.formats.encode_experts import encoded_experts
from tiermoe.formats.expert_format import ExpertFormat
from tiermoe.formats.gptq import SECONDS_A_WEIGHT
from tiermoe.formats.in_place import OWN_BITS
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import quantizer_used
from tiermoe.formats.source import ExpertSource
from tiermoe.formats.store import precision_key
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.hf.hub import Download, inspect_without_download
from tiermoe.model.hf.mtp_blueprint import with_mtp
from tiermoe.model.packing import kind_of, own_bytes, packable, packed_bytes
from tiermoe.model.prepare_store import found_store, missing, store_root
from tiermoe.offload.composition import Composition
from tiermoe.offload.computers import Rates
from tiermoe.offload.policies.eviction import EVICTIONS
from tiermoe.offload.presets import Resolved
from tiermoe.offload.usage import SizeCurve, read_record, record_path
from tiermoe.platform.threads import torch_threads
from tiermoe.types import MoeLayer, Segment

_SHORT = 1.0  # seconds of packing an expert up to which another one is encoded: the first touches memory and imports
_LONGEST = 1.5  # times as long as threads take that never wait for the interpreter or the drive


@dataclass(frozen=True, slots=True)
class Packing:
    """What packing writes into the store, once, before the model runs."""

    folder: Path
    experts: int  # bytes
    dense: int  # bytes
    free: int  # bytes on the folder's drive
    seconds: Range | None  # on this machine; None: of another one, or nothing is encoded
    before: str  # the command that has to calibrate and pack before a run; empty: the run packs


@dataclass(frozen=True, slots=True)
class Preview:
    """The plan of a model, and what it would do."""

    plan: MemoryPlan
    download: Download | None  # None: the checkpoint is here
    packing: Packing | None  # None: nothing is packed any more
    backend: Backend
    expectation: Expectation | None
    unknown: str  # why there is no expectation
    found: OtherBudget | None = None  # this plan by the record of the last run in this precision; None: no record
    other_budgets: Sequence[OtherBudget] = ()  # by the same record


def preview(
    model: str | os.PathLike[str],
    settings: Settings,
    rates: Callable[[ExpertFormat | None], Rates],
    here: bool = True,
    learns: bool = True,
    head: bool = False,
) -> Preview:
    """The preview of a model with `settings`. rates: called once, after everything else is known, with the format of
    experts that torch's operators compute (None: compiled kernels compute them); gives the rates of the machine. here:
    the model is to run on this machine, where the time of packing can be measured. learns: and with this machine's own
    drive, so that earlier runs count. head: with the model's own MTP head. ModelError as `inspect_without_download` and
    `with_mtp`, BudgetError as `plan_memory`."""
    blueprint, download = inspect_without_download(model, settings.store)
    if head:
        blueprint = with_mtp(blueprint, settings.store)
    return preview_of(blueprint, download, settings, rates, here, learns)


def preview_of(
    blueprint: Blueprint,
    download: Download | None,
    settings: Settings,
    rates: Callable[[ExpertFormat | None], Rates],
    here: bool,
    learns: bool,
) -> Preview:
    """`preview` of an inspected checkpoint."""
    plan = plan_for(blueprint, settings)
    resolved = resolve_for(blueprint, settings)
    backend = backend_of(blueprint, resolved)
    unknown = _unknown(blueprint, resolved.composition, plan)
    curve = _earlier_run(blueprint, resolved) if learns else None
    found = None if curve is None else at_slots(plan, curve, plan.slots)
    others = other_budgets(plan, curve)
    expectation = None
    if not unknown:
        try:
            by_torch = _formats(blueprint, resolved)[0] if backend.by_torch else None
            work = work_of(blueprint, resolved, plan, backend.ours)
            expectation = expect(work, rates(by_torch))
            expectation = expectation if curve is None else as_measured(expectation, work, curve, plan)
        except OSError as error:
            unknown = f"this machine cannot be measured ({error})"
    packing = _packing(blueprint, resolved, download is not None, here)
    return Preview(plan, download, packing, backend, expectation, unknown, found, others)


def work_of(blueprint: Blueprint, resolved: Resolved, plan: MemoryPlan, ours: bool) -> Work:
    """Bytes and operations of a token, by the plan and the sizes of the model's matrices. ours: a decoder of our
    own."""
    formats, bits = _formats(blueprint, resolved), resolved.settings.dense_bits_used
    _, packed = own_bytes(blueprint, "cpu") if bits == 16 else packed_bytes(blueprint, bits)
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
        together=plan.prompt_chunks,
        context=plan.context,
        layers=int(getattr(blueprint.config, "num_hidden_layers", len(moe))),
        ours=ours,
        packed_bytes=packed,
    )


def _formats(blueprint: Blueprint, resolved: Resolved) -> list[ExpertFormat]:
    return formats_of(blueprint, resolved)[resolved.precisions[0]]


def _earlier_run(blueprint: Blueprint, resolved: Resolved) -> SizeCurve | None:
    """Hits by cache size that the last run recorded, for an exact preset of whole experts; None without a record."""
    store = found_store(blueprint, resolved.settings.store)
    composition = resolved.composition
    if store is None or composition.lossy or composition.cache not in EVICTIONS:
        return None
    key = precision_key(resolved.precisions[0], resolved.settings.quantizer_used, composition.unit)
    return read_record(
        record_path(store.root, key), store.source.fingerprint, [each.experts for each in store.layers]
    ).curve


def _unknown(blueprint: Blueprint, composition: Composition, plan: MemoryPlan) -> str:
    """Why there is no expectation; empty if there can be one."""
    if isinstance(plan, GpuMemoryPlan):
        return "a GPU's rates are not known"
    if blueprint.family.encodes:
        return "a model with an encoder"
    whole = composition.unit == "expert" and composition.routing == "all" and composition.precision == "fixed"
    if not whole or composition.store != "disk" or composition.cache not in {*EVICTIONS, "all"}:
        return f"the preset {composition.name} reads otherwise than the recorded runs"
    return ""


def _packing(blueprint: Blueprint, resolved: Resolved, remote: bool, here: bool) -> Packing | None:
    """None where the checkpoint's store lacks nothing. remote: the checkpoint is not on this machine. here: its time is
    measured."""
    settings, unit = resolved.settings, resolved.composition.unit
    lacking, lacks_dense = missing(found_store(blueprint, settings.store), blueprint, resolved)
    if not lacking and not lacks_dense:
        return None
    placed = unit == "expert" and blueprint.experts.in_place(0, 0) is not None
    formats = formats_of(blueprint, resolved)
    written = {bits: formats[bits] for bits in lacking if bits < OWN_BITS or not placed}
    made_by = {bits: quantizer_used(settings.quantizer_used, bits, unit) for bits in written if bits < 8}
    seconds = None
    if here and made_by:
        source = _RandomExperts(blueprint.layers, blueprint.dtype) if remote or unit == "neuron" else blueprint.experts
        threads = settings.threads or torch.get_num_threads()
        times = [_packing_seconds(written[bits], quantizer, source, threads) for bits, quantizer in made_by.items()]
        seconds = Range(sum(each.low for each in times), sum(each.high for each in times))
    root = store_root(blueprint, settings.store)
    return Packing(
        root,
        sum(form.stored.nbytes * form.layer.experts for forms in written.values() for form in forms),
        packed_bytes(blueprint, settings.dense_bits_used)[1] if lacks_dense else 0,
        shutil.disk_usage(next(folder for folder in (root, *root.parents) if folder.exists())).free,
        seconds,
        next((f"tiermoe pack MODEL --bits {b} --quantizer {q}" for b, q in made_by.items() if q in CALIBRATED), ""),
    )


class _RandomExperts:
    """Experts of random weights (`source.ExpertSource`), for a checkpoint that is not here."""

    def __init__(self, layers: list[MoeLayer], dtype: torch.dtype) -> None:
        self.layers, self._dtype = layers, dtype

    def read(self, layer: int, expert: int) -> Mapping[str, torch.Tensor]:
        return {part.name: torch.randn(part.shape, dtype=self._dtype) for part in self.layers[layer].parts}

    def in_place(self, layer: int, expert: int) -> list[Segment] | None:
        return None


def _packing_seconds(formats: Sequence[ExpertFormat], quantizer: str, source: ExpertSource, threads: int) -> Range:
    """Seconds that packing all experts of `source` takes by so many threads. formats: of each layer. The first expert
    is read and encoded; for GPTQ, which takes seconds an expert, nothing is measured."""
    weights = sum(form.layer.experts * form.layer.expert_elements for form in formats)
    if quantizer in CALIBRATED and formats[0].bits < 8:
        seconds = weights * SECONDS_A_WEIGHT
    else:
        seconds = weights / formats[0].layer.expert_elements * _seconds_of_expert(formats[0], quantizer, source)
    return Range(seconds / threads, seconds / threads * _LONGEST)


def _seconds_of_expert(form: ExpertFormat, quantizer: str, source: ExpertSource) -> float:
    with torch_threads(1):  # as each worker of packing has
        encoded = encoded_experts(form, QUANTIZERS[quantizer], source, 0, 1)
        found = _seconds_of_next(encoded)
        if found < _SHORT and form.layer.experts > 1:
            found = min(found, _seconds_of_next(encoded))
        encoded.close()
    return found


def _seconds_of_next(encoded: Iterator[object]) -> float:
    """Of this thread alone, which does all the work: other programs' time does not count."""
    began = time.thread_time()
    next(encoded)
    return time.thread_time() - began
