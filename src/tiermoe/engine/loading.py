"""Loads the dense part of a model: what stays resident, and no second copy of it."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from tiermoe.engine.attachment import attach
from tiermoe.engine.engine import Engine, Model
from tiermoe.engine.hash_routing import router_tables
from tiermoe.engine.memory_plan import MemoryPlan
from tiermoe.engine.reading import Reading, rows_stay_on_disk
from tiermoe.engine.service import ExpertService
from tiermoe.errors import ModelError
from tiermoe.formats.store import Store
from tiermoe.kernels.linear import machine_layout
from tiermoe.model.decoder import decoder_for
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.hf.configs import quantization_of, text_config
from tiermoe.model.hf.experts import IMPLEMENTATION, experts_left_out, gate_of, register, routers_of, shells_of
from tiermoe.model.hf.face import face_base, face_class
from tiermoe.model.hf.generic import GenericDecoder
from tiermoe.model.moe import ExpertGate, named_gates
from tiermoe.model.packing import attach_dense, attach_own, own_linears, recipe_key, shared_table
from tiermoe.model.stored_weights import (
    EmbeddingOnDisk,
    LazyTensor,
    NoValues,
    embedding_key,
    leave_on_disk,
    read_dtypes,
    table_keys,
)
from tiermoe.model.weights import ModuleWeights
from tiermoe.offload.cuda import resolve_device
from tiermoe.offload.presets import Resolved
from tiermoe.offload.reader import ExtentReader
from tiermoe.platform import process_memory


def load_model(blueprint: Blueprint, store: Store, plan: MemoryPlan, resolved: Resolved, reading: Reading) -> Any:
    """A transformers model in evaluation mode, in front of its engine (`model.tiermoe`), whose decoder computes with
    the weights that the model holds."""
    settings, family = resolved.settings, blueprint.family
    device = resolve_device(settings.device)
    rows_on_disk = rows_stay_on_disk(blueprint, plan, reading)
    model = load_dense(blueprint, store, settings.dense_bits_used, device, rows_on_disk, reading)
    model.eval().requires_grad_(False)
    process_memory.settle()
    beside = [router for _, router in routers_of(model)]
    hash_tables = router_tables(beside, family)
    own: Any = None
    if settings.decoder != "generic" and not family.encodes and device == "cpu":
        own = decoder_for(blueprint.config, ModuleWeights(model), blueprint.dtype, settings.kv_bits)
    shells, base = list(shells_of(model).values()), face_base(type(model))
    if own is not None:
        routers = list(own.routers)
    else:
        routers = [router if family.forecasts and at not in hash_tables else None for at, router in enumerate(beside)]
    numbered = blueprint.configs.built is not blueprint.configs.text
    decoder = own or GenericDecoder(model, functools.partial(base.forward, model), family.continues, numbered)
    gates: Sequence[ExpertGate] = [gate_of(shell) for shell in shells]
    if blueprint.own_experts is not None and blueprint.outline.gate is not None:
        gates = named_gates(blueprint.outline)
    service = ExpertService(store, plan, resolved, reading, hash_tables)
    engine = Engine(service, Model(blueprint, decoder, gates, routers, getattr(model, "generation_config", None)))
    attach(engine, model, family)
    return model


def load_dense(
    blueprint: Blueprint, store: Store, dense_bits: int, device: str, embedding_on_disk: bool, reading: Reading
) -> Any:
    """A model on `device` with its dense weights and no experts. Weights that are packed, or left on disk, are never
    read at 16 bits. Packed ones are views of mapped files where `reading` maps them."""
    register()
    key = recipe_key(blueprint, dense_bits, machine_layout(device))
    packed = set(store.dense[key]["layers"]) if dense_bits < 16 else set()
    own = own_linears(blueprint, device) if dense_bits == 16 else {}
    shared = shared_table(blueprint, device) if own else None
    replaced = {key for name in (*packed, *own) for key in blueprint.outline.keys_of(f"{name}.weight")} | {shared}
    if embedding_on_disk:
        replaced.add(embedding_key(blueprint))
    dtypes, tables, stored = read_dtypes(blueprint), table_keys(blueprint), blueprint.checkpoint.tensors
    state = {
        name: NoValues(stored[name].shape, dtypes.get(name, stored[name].dtype))
        if name in replaced
        else LazyTensor(blueprint.checkpoint, name, dtypes.get(name))
        for name in blueprint.dense_keys
        if not (embedding_on_disk and name in tables)
    }
    if embedding_on_disk:
        outline = blueprint.outline
        state |= {path: NoValues(outline.tensors[path].shape, blueprint.dtype) for path in outline.tables}
    config = _config_for_loading(blueprint)
    with experts_left_out(blueprint.family, text_config(config)), _quiet_loading():
        model, info = face_class(blueprint.model_class).from_pretrained(
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
        with contextlib.closing(ExtentReader(keep=reading.drive.keep)) as reader:
            attach_dense(model, store, key, reader, device, reading.files)
    if own:
        attach_own(model, blueprint, device)
    if shared is not None:
        table = model.get_input_embeddings()
        model.set_input_embeddings(EmbeddingOnDisk.in_place_of(table, blueprint, [shared]))
    if embedding_on_disk:
        leave_on_disk(model, blueprint)
    _keep_output_whole(model)
    return model.to(device)


class OutputLayer(torch.nn.Linear):
    """An output layer that takes its rows (..., in_features) as one matrix.

    transformers hands it a prompt's last token as a slice of all of them. For an input of three dimensions whose rows
    lie apart torch multiplies in batches, with a copy of the whole weight: 1.1 GB for gpt-oss, and a minute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.functional.linear(x.reshape(-1, self.in_features), self.weight, self.bias)
        return rows.view(*x.shape[:-1], self.out_features)


def _keep_output_whole(model: Any) -> None:
    """Replaces a plain output layer by one that copies no weight."""
    plain = model.get_output_embeddings()
    if type(plain) is not torch.nn.Linear:
        return
    layer = OutputLayer(plain.in_features, plain.out_features, plain.bias is not None, device="meta")
    layer.weight, layer.bias = plain.weight, plain.bias
    model.set_output_embeddings(layer)


def _config_for_loading(blueprint: Blueprint) -> Any:
    """The config that transformers loads by. It names no quantisation: tensors are read by what they stand for, and
    transformers' quantiser would have nothing to do but to say on standard error what its kernels lack."""
    if quantization_of(blueprint.configs.built) is None:
        return blueprint.configs.built
    config = copy.deepcopy(blueprint.configs.built)
    del config.quantization_config
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
    if blueprint.generation_config() is not None:  # which has checked the file
        model.generation_config = GenerationConfig.from_pretrained(blueprint.directory)
    model.name_or_path = model.config.name_or_path = str(blueprint.directory)
