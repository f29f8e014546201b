"""A transformers model in front of an engine: its dense part is loaded without a second copy, its experts are the
engine's, and its calls are steps."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import logging

from tiermoe.engine.engine import Engine, Model
from tiermoe.engine.forecasts import router_tables
from tiermoe.engine.forward_context import given_tokens, past_tokens
from tiermoe.engine.memory_plan import MemoryPlan
from tiermoe.engine.needs import runs_own
from tiermoe.engine.reading import Reading, rows_stay_on_disk
from tiermoe.engine.rerouting import SavedCache
from tiermoe.engine.service import ExpertService
from tiermoe.engine.steps import is_finite, not_finite
from tiermoe.errors import ModelError
from tiermoe.formats.store import Store
from tiermoe.model.cache.kv import KVCache
from tiermoe.model.decoder import Decoder, decoder_for
from tiermoe.model.families.family import Family
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.hf.configs import cache_of, quantization_of, text_config
from tiermoe.model.hf.experts import IMPLEMENTATION, experts_left_out, gate_of, register, routers_of, shells_of
from tiermoe.model.hf.face import Face, SlabCache, face_base, face_class, takes_own_cache
from tiermoe.model.hf.generic import GenericDecoder, pieces
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
from tiermoe.offload.cuda import GpuErrors, resolve_device
from tiermoe.offload.presets import Resolved
from tiermoe.offload.reader import ExtentReader
from tiermoe.platform import process_memory

NewCache = Callable[[int], KVCache]
_BEGINS = 512  # tokens that a sequence on a GPU, which takes its memory at once, has room for until it grows


def load_model(blueprint: Blueprint, store: Store, plan: MemoryPlan, resolved: Resolved, reading: Reading) -> Any:
    """A transformers model in evaluation mode, in front of its engine (`model.tiermoe`), whose decoder computes with
    the weights that the model holds."""
    settings, family = resolved.settings, blueprint.family
    device = resolve_device(settings.device)
    rows_on_disk = rows_stay_on_disk(blueprint, plan, reading)
    with GpuErrors(device, "loading the dense weights"):
        model = load_dense(blueprint, store, settings.dense_bits_used, device, rows_on_disk, reading)
    model.eval().requires_grad_(False)
    process_memory.settle()
    beside = [router for _, router in routers_of(model)]
    hash_tables = router_tables(beside, family)
    own: Any = None
    if runs_own(blueprint, settings, device):
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
    key = recipe_key(blueprint, dense_bits)
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
    _keep_dtypes(model, blueprint)
    blueprint.checkpoint.close()
    _take_from_directory(model, blueprint)
    if packed:
        with contextlib.closing(ExtentReader(keep=reading.keep)) as reader:
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


def _keep_dtypes(model: Any, blueprint: Blueprint) -> None:
    """Puts parameters into the dtypes of the outline: transformers widens routers from 5.24 on."""
    for path, parameter in model.named_parameters():
        kept = blueprint.outline.tensors.get(path)
        if kept is not None and parameter.is_floating_point() and parameter.dtype != kept.dtype:
            parameter.data = parameter.data.to(kept.dtype)


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


def attach(engine: Engine, model: Any, family: Family) -> None:
    """Puts a model whose class `hf.face.face_class` made in front of its engine, until that is closed."""
    for shell, experts in zip(shells_of(model).values(), engine.layers, strict=True):
        shell.run_experts = experts
    if family.encodes:
        for undo in engine.context.follow_encoder(model, family.encoder_decoder):
            engine.before_closing(undo)
    use_cache = bool(getattr(model.config.get_text_config(), "use_cache", True))
    front = Front(engine, face_base(type(model)), use_cache, family)
    model.serve(engine, front)


class Front:
    """What a transformers model with an engine does when it is called: a step where the decoder answers, else the code
    of its own class, whose passes are told apart by their lengths.

    base: the class whose code runs where the engine's decoder is none of ours."""

    def __init__(self, engine: Engine, base: Any, use_cache: bool, family: Family) -> None:
        self._family = family
        self._engine = engine
        self._context = engine.context
        self._base = base
        self._parameters = [name for name in inspect.signature(base.forward).parameters if name != "self"]
        self._face: Face | None = None
        if isinstance(engine.decoder, Decoder):
            begins = None if engine.device.type == "cpu" else min(_BEGINS, engine.plan.context)
            new_cache = cast(NewCache, functools.partial(engine.new_cache, context=begins))
            self._face = Face(self._parameters, use_cache, new_cache)

    def forward(self, model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """transformers' output object."""
        asked = self._face.parse(arguments, named) if self._face is not None else None
        if asked is not None and self._face is not None:
            asked.cache.kv.reserve(max(row.end for row in asked.batch.rows))
            logits = self._engine.step(asked.batch, asked.cache.kv, every=asked.keep != 1)
            return self._face.answer(asked, logits)
        if self._family.encodes:  # its encoder and its decoder are passes
            output = self._base.forward(model, *arguments, **named)
        else:
            with GpuErrors(str(self._engine.device), "computing"), self._context.lock:
                self._context.start()
                output = self._by_transformers(model, arguments, named)
                self._context.finish()
        found: Any = getattr(output, "logits", None)
        if found is not None and not is_finite(found[:, -1]):
            raise not_finite()
        return output

    def cache_for_generate(self, generation_config: Any, model_kwargs: dict[str, Any]) -> SlabCache | None:
        """The cache that `generate()` begins with; None: one of transformers'."""
        if self._face is None or not takes_own_cache(generation_config, model_kwargs):
            return None
        return self._face.new_cache()

    def _by_transformers(self, model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = {**dict(zip(self._parameters, arguments, strict=False)), **named}
        ids, rows, length = given_tokens((), given)
        cache = cache_of(given)
        if ids is not None and cache is not None:
            ends = pieces(past_tokens(given), length, self._engine.settings.chunk, self._family.continues)
            if len(ends) > 1:
                return self._in_chunks(model, given, ids, ends)
        self._context.begin_call(ids, rows, length, past_tokens(given), prompt=False)
        confident = self._engine.confident
        if confident is None or self._context.phase != "decode":
            return self._base.forward(model, **given)
        saved = SavedCache(cache)
        return confident.decode(lambda: self._base.forward(model, **given), lambda output: output.logits, saved.restore)

    def _in_chunks(self, model: Any, given: dict[str, Any], ids: Tensor, ends: list[tuple[int, int]]) -> Any:
        """A prompt, some of it at a time. The last output has the logits of all."""
        past = past_tokens(given)
        keep = given.get("logits_to_keep") or 0
        kept: list[Tensor] = []
        for begin, end in ends:
            part = {**given, "input_ids": ids[:, begin:end], "logits_to_keep": min(keep, end - begin)}
            if given.get("attention_mask") is not None and given["attention_mask"].ndim == 2:
                part["attention_mask"] = given["attention_mask"][:, : past + end]
            if given.get("position_ids") is not None:
                part["position_ids"] = given["position_ids"][..., begin:end]
            self._context.begin_call(ids[:, begin:end], ids.shape[0], end - begin, past + begin, prompt=True)
            output = self._base.forward(model, **part)
            kept.append(output.logits)
        if keep != 1:
            output.logits = torch.cat(kept, dim=1)[:, -keep:]
        return output
