"""Loads the dense part of a model: what stays resident, and no second copy of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers.utils import logging

from tiermoe.errors import ModelError
from tiermoe.kernels import machine_layout
from tiermoe.model.face import face_class
from tiermoe.runtime import footprint
from tiermoe.runtime.blueprint import Blueprint
from tiermoe.runtime.dense import attach_dense, recipe_key
from tiermoe.runtime.embedding import embedding_key, leave_on_disk
from tiermoe.runtime.experts import register
from tiermoe.runtime.needs import Need, Phase
from tiermoe.runtime.shells import IMPLEMENTATION, experts_left_out
from tiermoe.store.checkpoint import Checkpoint
from tiermoe.store.store import Store
from tiermoe.tiers.reader import ExtentReader

_CONVERTED = 16 << 20  # bytes of a tensor that are there in two dtypes at a time
_READERS = 4  # threads with which transformers reads a checkpoint


def load_dense(
    blueprint: Blueprint, store: Store, dense_bits: int, device: str = "cpu", embedding_on_disk: bool = False
) -> Any:
    """A model on `device` with its dense weights and no experts. Weights that are packed, or left on disk, are never
    read at 16 bits."""
    register()
    key = recipe_key(blueprint, dense_bits, machine_layout(device))
    packed = set(store.dense[key]["layers"]) if dense_bits < 16 else set()
    replaced = {blueprint.outline.tensors[f"{name}.weight"].key for name in packed}
    if embedding_on_disk:
        replaced.add(embedding_key(blueprint))
    dtypes = _dtypes(blueprint)
    state = {
        name: LazyTensor(blueprint.checkpoint, name, dtypes.get(name), name in replaced)
        for name in blueprint.dense_keys
    }
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


class LazyTensor:
    """A tensor of the checkpoint that transformers' loader reads when it takes it (`tensor[...]`), as `dtype`: some
    rows at a time where that is another one, so that it is never there in both. dtype None: as it is stored. A
    placeholder takes no memory and stands for a weight that is replaced by a packed one."""

    def __init__(self, checkpoint: Checkpoint, key: str, dtype: torch.dtype | None, placeholder: bool) -> None:
        entry = checkpoint.tensors[key]
        self.shape, self.dtype = torch.Size(entry.shape), dtype or entry.dtype
        self._checkpoint, self._key, self._placeholder = checkpoint, key, placeholder

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self._placeholder:
            return torch.zeros(1, dtype=self.dtype).expand(self.shape)
        entry = self._checkpoint.tensors[self._key]
        if entry.dtype == self.dtype or not self.shape:
            return self._checkpoint.read(self._key)[index]
        rows = torch.empty(self.shape, dtype=self.dtype)
        step = max(1, _CONVERTED * len(rows) // max(1, entry.nbytes))
        for first in range(0, len(rows), step):
            last = min(first + step, len(rows))
            rows[first:last] = self._checkpoint.read_rows(self._key, first, last)
        return rows[index]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return str(self.dtype)


def _dtypes(blueprint: Blueprint) -> dict[str, torch.dtype]:
    """Checkpoint key → the dtype that its parameter has in the model, of those that are taken as they are."""
    stored = blueprint.checkpoint.tensors
    return {
        tensor.key: tensor.read_as
        for tensor in blueprint.outline.tensors.values()
        if tensor.key is not None and tensor.read_as.is_floating_point and stored[tensor.key].dtype.is_floating_point
    }


def loading_needs(blueprint: Blueprint, dense: int) -> list[Need]:
    """Loading holds the `dense` bytes that stay and, at most, what is converted: of tensors that are taken as they are
    the rows that transformers' threads read at a time, of the others all that they are made of."""
    direct, stored = _dtypes(blueprint), blueprint.checkpoint.tensors
    converted = blueprint.outline.converted_bytes
    if any(stored[key].dtype != dtype for key, dtype in direct.items()):
        converted += _READERS * _CONVERTED
    return [Need("dense", dense, Phase.LOADING), Need("conversion", converted, Phase.LOADING)]


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
