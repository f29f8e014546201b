"""`tiermoe.load`: from a checkpoint to a transformers model whose experts are served from the store."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from tiermoe.config import Settings
from tiermoe.config import settings as make_settings
from tiermoe.runtime import footprint
from tiermoe.runtime.blueprint import Blueprint, inspect_model
from tiermoe.runtime.composition import Resolved, resolve
from tiermoe.runtime.embedding import embedding_key
from tiermoe.runtime.engine import Engine
from tiermoe.runtime.loading import load_dense
from tiermoe.runtime.memory_plan import MemoryPlan
from tiermoe.runtime.plan import plan_memory
from tiermoe.runtime.prepare_store import Progress, ensure_packed, open_or_create, store_root
from tiermoe.runtime.reading import open_reading
from tiermoe.runtime.resolve import load_tokenizer, resolve_model
from tiermoe.tiers.cuda import resolve_device


def load(model: str | os.PathLike[str], *, progress: Progress | None = None, **options: Any) -> tuple[Any, Any]:
    """Loads a MoE model within a memory budget.

    model: a directory or a hub id. options: the fields of `tiermoe.config.Settings`, sizes also as text
    (`memory="6GiB"`, `bits=4`, `cache="25%"`, …). progress: called with (what, done, total) while experts are packed,
    which happens once per checkpoint and precision.

    Returns (model, tokenizer): a transformers model in evaluation mode, with `model.tiermoe` for statistics, and its
    tokenizer. Raises a TiermoeError that says what to do where the model, the budget or an option is not usable.
    """
    settings = make_settings(**options)
    directory = resolve_model(model)
    blueprint = inspect_model(directory, os.fspath(model))
    tokenizer = load_tokenizer(directory)
    return load_blueprint(blueprint, settings, progress), tokenizer


def load_blueprint(blueprint: Blueprint, settings: Settings, progress: Progress | None = None) -> Any:
    """The model of an inspected checkpoint, planned, packed where needed, and attached."""
    return load_resolved(blueprint, resolve_for(blueprint, settings), progress)


def load_resolved(blueprint: Blueprint, resolved: Resolved, progress: Progress | None = None) -> Any:
    """`load_blueprint` with a composition that is ready."""
    settings = resolved.settings
    device = resolve_device(settings.device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    footprint.settle()
    plan = plan_memory(blueprint, resolved)
    store = open_or_create(blueprint, store_root(blueprint, settings.store))
    unit = resolved.composition.unit
    for bits in resolved.precisions:
        ensure_packed(store, blueprint, bits, settings.quantizer, settings.dense_bits_used, progress, device, unit)
    reading = open_reading(plan, store, resolved, blueprint, device)
    # where nothing is copied, reading the whole embedding is what loading would wait for
    rows_on_disk = plan.embedding_on_disk or (reading.files is not None and embedding_key(blueprint) is not None)
    try:
        model = load_dense(blueprint, store, settings.dense_bits_used, device, rows_on_disk, reading)
        model.eval().requires_grad_(False)
        footprint.settle()
        Engine(model, store, plan, resolved, blueprint, reading)
    except BaseException:
        reading.close()
        raise
    return model


def resolve_for(blueprint: Blueprint, settings: Settings) -> Resolved:
    """The settings' preset, made ready for a checkpoint. The default one asks no routers where they name no experts by
    index (Switch), and shares its slots where an encoder's layers run only once."""
    if settings.preset == Settings().preset and blueprint.family.adapter:
        settings = replace(settings, set={"prefetch": "none", "allotment": "pool", **settings.set})
    root = store_root(blueprint, settings.store)
    return resolve(settings, root, blueprint.checkpoint.fingerprint(), blueprint.name)


def plan(model: str | os.PathLike[str], **options: Any) -> MemoryPlan:
    """What would go where for `tiermoe.load(model, **options)`, without loading or packing anything."""
    settings = make_settings(**options)
    blueprint = inspect_model(resolve_model(model), os.fspath(model))
    footprint.settle()
    return plan_memory(blueprint, resolve_for(blueprint, settings))
