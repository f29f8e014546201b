"""`tiermoe.load`: from a checkpoint to a transformers model whose experts are served from the store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers.utils import logging

from tiermoe.config import Settings
from tiermoe.config import settings as make_settings
from tiermoe.errors import ModelError
from tiermoe.kernels import machine_layout
from tiermoe.model.face import face_class
from tiermoe.runtime import footprint
from tiermoe.runtime.blueprint import Blueprint, inspect_model
from tiermoe.runtime.composition import Resolved, resolve
from tiermoe.runtime.dense import attach_dense, recipe_key
from tiermoe.runtime.embedding import embedding_key, leave_on_disk
from tiermoe.runtime.engine import Engine
from tiermoe.runtime.experts import register
from tiermoe.runtime.memory_plan import MemoryPlan
from tiermoe.runtime.plan import plan_memory
from tiermoe.runtime.prepare_store import Progress, ensure_packed, open_or_create, store_root
from tiermoe.runtime.resolve import load_tokenizer, resolve_model
from tiermoe.runtime.shells import IMPLEMENTATION, experts_left_out
from tiermoe.store.checkpoint import Checkpoint
from tiermoe.store.store import Store
from tiermoe.tiers.cuda import resolve_device
from tiermoe.tiers.reader import ExtentReader


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
    model = load_dense(blueprint, store, settings.dense_bits_used, device, plan.embedding_on_disk)
    model.eval().requires_grad_(False)
    footprint.settle()
    Engine(model, store, plan, resolved, blueprint)
    return model


def resolve_for(blueprint: Blueprint, settings: Settings) -> Resolved:
    """The settings' preset, made ready for a checkpoint. The default one asks no routers where they name no experts by
    index (Switch), and shares its slots where an encoder's layers run only once."""
    if settings.preset == Settings().preset and blueprint.family.adapter:
        settings = replace(settings, set={"prefetch": "none", "allotment": "pool", **settings.set})
    root = store_root(blueprint, settings.store)
    return resolve(settings, root, blueprint.checkpoint.fingerprint(), blueprint.name)


def load_dense(
    blueprint: Blueprint, store: Store, dense_bits: int, device: str = "cpu", embedding_on_disk: bool = False
) -> Any:
    """A model on `device` with its dense weights and no experts. Weights that are packed, or left on disk, are never
    read at 16 bits."""
    register()
    key = recipe_key(blueprint, dense_bits, machine_layout(device))
    packed = set(store.dense[key]["layers"]) if dense_bits < 16 else set()
    replaced = {blueprint.experts.direct_key(f"{name}.weight") for name in packed}
    if embedding_on_disk:
        replaced.add(embedding_key(blueprint))
    state = {name: LazyTensor(blueprint.checkpoint, name, name in replaced) for name in blueprint.dense_keys}
    config = _config_for_loading(blueprint)
    with experts_left_out(blueprint.family, config), footprint.without_meta_references(), _quiet_loading():
        model, info = face_class(type(blueprint.skeleton)).from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=blueprint.dtype,
            experts_implementation=IMPLEMENTATION,
            output_loading_info=True,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"the checkpoint in {blueprint.directory} lacks {len(missing)} weights, the first is {missing[0]}; "
            f"download it again"
        )
    blueprint.checkpoint.close()
    _take_from_directory(model, blueprint)
    if packed:
        attach_dense(model, store, key, ExtentReader(), device)
    if embedding_on_disk:
        leave_on_disk(model, blueprint)
    return model.to(device)


class LazyTensor:
    """A tensor of the checkpoint that transformers' loader reads when it takes it (`tensor[...]`). A placeholder takes
    no memory and stands for a weight that is replaced by a packed one."""

    def __init__(self, checkpoint: Checkpoint, key: str, placeholder: bool) -> None:
        entry = checkpoint.tensors[key]
        self.shape, self.dtype = torch.Size(entry.shape), entry.dtype
        self._checkpoint, self._key, self._placeholder = checkpoint, key, placeholder

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self._placeholder:
            return torch.zeros(1, dtype=self.dtype).expand(self.shape)
        return self._checkpoint.read(self._key)[index]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return str(self.dtype)


def plan(model: str | os.PathLike[str], **options: Any) -> MemoryPlan:
    """What would go where for `tiermoe.load(model, **options)`, without loading or packing anything."""
    settings = make_settings(**options)
    blueprint = inspect_model(resolve_model(model), os.fspath(model))
    footprint.settle()
    return plan_memory(blueprint, resolve_for(blueprint, settings))


def _config_for_loading(blueprint: Blueprint) -> Any:
    config = blueprint.config
    if blueprint.quantized:
        quantization = config.quantization_config
        settings = quantization if isinstance(quantization, dict) else quantization.to_dict()
        config.quantization_config = {**settings, "dequantize": True}
    return config


@contextlib.contextmanager
def _quiet_loading() -> Iterator[None]:
    """Without transformers' progress bar, which would be drawn wherever standard error goes."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _take_from_directory(model: Any, blueprint: Blueprint) -> None:
    """What transformers takes from a model's directory, which a state dict does not have: its path and its generation
    settings."""
    generation_config = blueprint.generation_config()
    if generation_config is not None:
        model.generation_config = generation_config
    model.name_or_path = model.config.name_or_path = str(blueprint.directory)
