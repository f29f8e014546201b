"""From a checkpoint to an engine: alone, for the commands, or behind a transformers model, as `tiermoe.load` gives it.

An engine alone needs no modelling code of transformers where the family has a decoder of ours, the store lacks nothing
and keeps the checkpoint's outline (`starts_lean`). Everything else is built around a transformers model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tiermoe.config import CALIBRATED, Settings
from tiermoe.config import settings as make_settings
from tiermoe.engine.budget import plan_memory
from tiermoe.engine.engine import Engine, Model
from tiermoe.engine.forecasts import decoder_tables
from tiermoe.engine.memory_plan import MemoryPlan
from tiermoe.engine.needs import runs_own
from tiermoe.engine.reading import Reading, open_reading, rows_stay_on_disk
from tiermoe.engine.service import ExpertService
from tiermoe.errors import ConfigError
from tiermoe.formats.in_place import OWN_BITS
from tiermoe.formats.quantizers import UNCALIBRATED
from tiermoe.formats.store import Store, joined
from tiermoe.model.decoder import Decoder, decoder_for
from tiermoe.model.hf.blueprint import Blueprint, inspect_model
from tiermoe.model.hf.hub import inspect_without_download, resolve_model
from tiermoe.model.moe import named_gates
from tiermoe.model.packing import recipe_key, with_own_dense
from tiermoe.model.prepare_store import Progress, ensure_packed, found_store, is_packed, open_or_create, store_root
from tiermoe.model.stored_weights import StoredWeights
from tiermoe.model.tokenizer import load_tokenizer
from tiermoe.offload.composition import kept_from_gpus
from tiermoe.offload.cuda import resolve_device
from tiermoe.offload.presets import Resolved, compose, resolve
from tiermoe.platform import process_memory
from tiermoe.types import USUAL, Use


class Loaded(NamedTuple):
    """A transformers model and its tokenizer. As a context it closes the model's engine in the end."""

    model: Any
    tokenizer: Any

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.tiermoe.close()


def load(model: str | os.PathLike[str], *, progress: Progress | None = None, **options: Any) -> Loaded:
    """Loads a MoE model within a memory budget.

    model: a directory or a hub id. options: the fields of `tiermoe.config.Settings`, sizes also as text
    (`memory="6GiB"`, `bits=4`, `cache="25%"`, …). progress: called with (what, done, total) while experts are packed,
    which happens once per checkpoint and precision, or while another process that packs them is waited for.

    Returns (model, tokenizer): a transformers model in evaluation mode, with `model.tiermoe` for statistics, and its
    tokenizer. The model's modules are made by transformers' modelling code even where our own decoder computes, because
    `generate()`, pipelines and calls that the decoder does not answer need them; the commands make none (`start`).
    `model.get_input_embeddings()` looks up tokens' rows. Where the table stays on disk (memory is short, the store's
    files are mapped, or the checkpoint comes quantised) its `weight` has a shape and a dtype and no values: it is on
    the meta device.
    What the engine holds (memory for experts, threads, files) is given back by `model.tiermoe.close()`, at the end of
    `with tiermoe.load(...) as (model, tokenizer):`, or when the model is collected as garbage.
    Raises a TiermoeError that says what to do where the model, the budget or an option is not usable.
    """
    settings = make_settings(**options)
    directory = resolve_model(model)
    blueprint = inspect_model(directory, os.fspath(model), settings.store)
    tokenizer = load_tokenizer(directory)
    return Loaded(load_blueprint(blueprint, settings, progress), tokenizer)


def load_blueprint(blueprint: Blueprint, settings: Settings, progress: Progress | None = None) -> Any:
    """The transformers model of an inspected checkpoint, planned, packed if needed, in front of its engine."""
    return load_resolved(blueprint, resolve_for(blueprint, settings), progress)


def load_resolved(
    blueprint: Blueprint,
    resolved: Resolved,
    progress: Progress | None = None,
    found: Store | None = None,
    use: Use = USUAL,
) -> Any:
    """`load_blueprint` with a composition that is ready. found: the checkpoint's store, where it is open."""
    found = found or found_store(blueprint, resolved.settings.store)
    store, plan = _prepared(blueprint, resolved, found, progress, use, lean=False)
    from tiermoe.engine.loading import load_model  # late: it imports transformers' modelling code

    with open_reading(plan, store, resolved, blueprint, resolve_device(resolved.settings.device)) as reading:
        model = load_model(blueprint, store, plan, resolved, reading)
    process_memory.keep_activations(plan.activations, plan.idle_activations)
    return model


def start(blueprint: Blueprint, settings: Settings, progress: Progress | None = None, use: Use = USUAL) -> Engine:
    """The engine of an inspected checkpoint, planned for its use, and packed if needed. ModelError if the model
    writes no text."""
    blueprint.require_text()
    resolved = resolve_for(blueprint, settings)
    if blueprint.parts:
        check_mtp(blueprint, resolved)
    found = found_store(blueprint, settings.store)
    lean = starts_lean(blueprint, resolved, found)
    if not lean and not blueprint.parts:
        engine: Engine = load_resolved(blueprint, resolved, progress, found, use).tiermoe
        return engine
    store, plan = _prepared(blueprint, resolved, found, progress, use, lean)
    with open_reading(plan, store, resolved, blueprint, "cpu") as reading:
        model = _lean_model(blueprint, store, plan, resolved, reading)
        assert isinstance(model.decoder, Decoder)
        service = ExpertService(store, plan, resolved, reading, decoder_tables(model.decoder))
        engine = Engine(service, model)
    process_memory.keep_activations(plan.activations, plan.idle_activations)
    return engine


def check_mtp(blueprint: Blueprint, resolved: Resolved) -> None:
    """ConfigError if nothing computes a model's MTP head, or a calibration says nothing of its experts."""
    if not _runs_own_on_cpu(blueprint, resolved.settings):
        raise ConfigError("--draft mtp runs on tiermoe's own decoder, on a CPU; leave it, --decoder or --device out")
    if resolved.tables.bits:
        raise ConfigError(
            f"--draft mtp does not apply to {resolved.composition.name}, whose calibration has no bits of the head's "
            f"experts; leave one of them out"
        )
    quantizer = resolved.settings.quantizer_used
    if quantizer in CALIBRATED and min(resolved.precisions) < 8:
        raise ConfigError(
            f"--draft mtp does not apply to --quantizer {quantizer}: a calibration text runs without the head's "
            f"experts; choose --quantizer {UNCALIBRATED[quantizer]}"
        )


def starts_lean(blueprint: Blueprint, resolved: Resolved, store: Store | None) -> bool:
    """Whether `start` needs no modelling code of transformers. store: the checkpoint's, as it is (`found_store`)."""
    known = blueprint.known is not None and blueprint.known.whole
    ours = _runs_own_on_cpu(blueprint, resolved.settings)
    return ours and known and is_packed(store, blueprint, resolved)


def _runs_own_on_cpu(blueprint: Blueprint, settings: Settings) -> bool:
    return resolve_device(settings.device) == "cpu" and runs_own(blueprint, settings, "cpu")


def _prepared(
    blueprint: Blueprint, resolved: Resolved, found: Store | None, progress: Progress | None, use: Use, lean: bool
) -> tuple[Store, MemoryPlan]:
    """The plan, and the store with all that it asks for. Nothing of the model is loaded, nor are experts."""
    if resolved.settings.threads is not None:
        torch.set_num_threads(resolved.settings.threads)
    _measured(blueprint, resolved, found, lean)
    plan = plan_memory(blueprint, resolved, found, use)
    stores = [
        _packed(part, resolved, None if blueprint.parts else found, progress, plan.packers)
        for part in blueprint.parts or (blueprint,)
    ]
    return (joined(*stores) if blueprint.parts else stores[0]), plan


def _packed(
    blueprint: Blueprint, resolved: Resolved, found: Store | None, progress: Progress | None, workers: int
) -> Store:
    """The store of a model, or of one of its parts, with all that is asked for."""
    settings, unit = resolved.settings, resolved.composition.unit
    store = open_or_create(blueprint, store_root(blueprint, settings.store), found=found, waiting=progress)
    for bits in resolved.precisions:
        quantizer, dense_bits = settings.quantizer_used, settings.dense_bits_used
        ensure_packed(store, blueprint, bits, quantizer, dense_bits, progress, unit, workers)
    return store


def _measured(blueprint: Blueprint, resolved: Resolved, store: Store | None, lean: bool) -> None:
    """Imports and makes what this process is going to hold for a transformers model before its memory is measured: a
    plan counts it. Packing, and the plan of the generic decoder, ask the model's skeleton."""
    if not lean:
        assert blueprint.model_class is not None
        own = runs_own(blueprint, resolved.settings, resolve_device(resolved.settings.device))
        if not own or not is_packed(store, blueprint, resolved):
            assert blueprint.skeleton is not None
    process_memory.settle()


def _lean_model(blueprint: Blueprint, store: Store, plan: MemoryPlan, resolved: Resolved, reading: Reading) -> Model:
    """The decoder over weights that nothing else holds, and what goes with it."""
    bits = resolved.settings.dense_bits_used
    dense = recipe_key(blueprint, bits) if bits < 16 else None
    on_disk = rows_stay_on_disk(blueprint, plan, reading)
    weights = StoredWeights(blueprint, store, dense, on_disk, reading.files, reading.keep)
    decoder = decoder_for(blueprint.config, weights, blueprint.dtype, resolved.settings.kv_bits)
    assert decoder is not None
    gates = named_gates(blueprint.outline)
    routers = [*decoder.routers, *[None] * store.drafting]  # no forecasts: an MTP head runs alone
    return Model(blueprint, decoder, gates, routers, blueprint.generation_settings())


def resolve_for(blueprint: Blueprint, settings: Settings) -> Resolved:
    """The settings' preset, made ready for a checkpoint. The default one asks no routers where they name no experts by
    index (Switch), and shares its slots where an encoder's layers run only once. Experts that come quantised stay in
    their types where neither the settings nor the preset ask for bits; ModelError if they cannot. So do dense layers
    where neither asks for dense bits. What a CPU alone computes runs there under `auto`; ConfigError if a GPU is named
    for experts in their types."""
    if settings.preset == Settings().preset and not blueprint.family.forecasts:
        changes = {"prefetch": "none"} | ({"allotment": "pool"} if blueprint.family.encodes else {})
        settings = replace(settings, set={**changes, **settings.set})
    preset = compose(settings.preset, settings.set)
    if (settings.bits or preset.bits) is None and blueprint.comes_quantized:
        if blueprint.own_experts is None:
            blueprint.require_own_experts()  # raises, and says why
        settings = replace(settings, bits=OWN_BITS)
    no_gpu = ""
    if kept := _in_types_of_cpus(blueprint, settings.bits or preset.bits) or kept_from_gpus(preset):
        if settings.device == "auto":
            no_gpu = "" if resolve_device("auto") == "cpu" else f"no GPU is used: {kept}"
            settings = replace(settings, device="cpu")
        elif settings.device != "cpu":
            raise ConfigError(f"device '{settings.device}' was asked for, but {kept}, or use --device cpu")
    if preset.dense_bits is None:
        settings = with_own_dense(settings, blueprint, resolve_device(settings.device))
    root = store_root(blueprint, settings.store)
    resolved = resolve(settings, root, blueprint.checkpoint.fingerprint(), blueprint.name, len(blueprint.layers))
    _check_also(resolved)
    return replace(resolved, no_gpu=no_gpu)


def _in_types_of_cpus(blueprint: Blueprint, bits: int | None) -> str:
    """Why experts at these bits are computed on CPUs alone, and what to do; empty if they are not."""
    if bits != OWN_BITS or blueprint.own_experts is None:
        return ""
    where = "GGUF file" if blueprint.in_gguf else "checkpoint"
    return (
        f"the {where} has its experts in {blueprint.own_types()}, which CPUs alone have kernels for; --bits 4 packs "
        f"them for a GPU"
    )


def _check_also(resolved: Resolved) -> None:
    """ConfigError if `also` is no folder, or the composition reads no whole experts from a drive."""
    also, composition = resolved.settings.also, resolved.composition
    if also is None:
        return
    if not also.is_dir():
        raise ConfigError(f"--also {also} is no folder; copy the files of experts there, all or some")
    for part, value in (("unit", "neuron"), ("store", "memory")):
        if getattr(composition, part) == value:
            raise ConfigError(f"--also serves whole experts from two drives, and {composition.name} has {part}={value}")


def plan(model: str | os.PathLike[str], **options: Any) -> MemoryPlan:
    """What `load` would put where with these options, without downloading, loading or packing anything.

    The interpreter is measured with what `load` holds when it plans: transformers' model class, and the tokenizer of a
    model that is downloaded. So `load(model, memory=plan(model, …).total, …)` gives the experts the same memory but for
    the 1 to 2 MiB that the process grows by in between. `run` and `chat` of a packed model hold less (`plan_for`)."""
    settings = make_settings(**options)
    blueprint, download = inspect_without_download(model, settings.store)
    tokenizer = load_tokenizer(blueprint.directory) if download is None else None
    resolved, found = resolve_for(blueprint, settings), found_store(blueprint, settings.store)
    _measured(blueprint, resolved, found, lean=False)
    planned = plan_memory(blueprint, resolved, found)
    del tokenizer  # held until here: it was measured
    return planned


def plan_for(blueprint: Blueprint, settings: Settings, use: Use = USUAL) -> MemoryPlan:
    """What `start` would put where."""
    return plans_for(blueprint, settings)(settings.batch, use)


def plans_for(blueprint: Blueprint, settings: Settings) -> Callable[[int, Use], MemoryPlan]:
    """`plan_for` with other batches and uses. What this process holds is measured once for all."""
    resolved = resolve_for(blueprint, settings)
    store = found_store(blueprint, settings.store)
    _measured(blueprint, resolved, store, starts_lean(blueprint, resolved, store))

    def plan_of(batch: int, use: Use) -> MemoryPlan:
        return plan_memory(blueprint, replace(resolved, settings=replace(resolved.settings, batch=batch)), store, use)

    return plan_of
