"""Outline of a model in a GGUF file, from its config and the names and shapes of its tensors alone, without
transformers' modelling code. A file that is not as its family has it is left to that code to judge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_checkpoint import GgufCheckpoint
from tiermoe.formats.outline import DenseTensor, Outline
from tiermoe.model.families import decoder_family
from tiermoe.model.families.family import Family
from tiermoe.model.layer import DecoderLayer
from tiermoe.model.weights import Scope, ShapesOnly
from tiermoe.types import MoeLayer

_SMALLEST = 4096  # elements of a linear layer that is packed
_OUTPUT = "lm_head"
_COMPUTED_WITH = ("mamba.dt_proj", ".f_a_proj", ".f_b_proj", ".f_proj", "gate")
"""Ends of linear layers that stay as they are: transformers' code takes the weight itself, or calls a gate what leads
to it (`skeleton`)."""


def outline_of(checkpoint: GgufCheckpoint, config: Any, dtype: torch.dtype) -> Outline | None:
    """The outline; None if the file is not as its family has it, if transformers' code decodes the family, or in
    float16, in which transformers keeps some modules in float32."""
    family = decoder_family(config)
    if family is None or family.gate(config) is None or dtype == torch.float16:
        return None
    if family.gguf is not None and not family.gguf.states_shapes:  # V2's files are of V3's names
        return None
    shapes = ShapesOnly({name: tensor.shape for name, tensor in checkpoint.tensors.items()}, dtype)
    w = Scope(shapes, config, dtype, family.norms)
    table = f"{family.embedding}.weight"
    try:
        w.tensor(table, config.vocab_size, w.hidden)
        layers = [family.layer(w.at(f"model.layers.{at}"), config, at) for at in range(config.num_hidden_layers)]
        family.end(w, config)
        if not config.tie_word_embeddings:
            w.linear(_OUTPUT, config.vocab_size, w.hidden)
    except ModelError:
        return None
    mixtures = _mixtures(layers)
    known = {*shapes.taken, *_experts_of(mixtures)}
    if not mixtures or set(checkpoint.tensors) != known or not _fit(checkpoint, mixtures):
        return None
    tied = {f"{_OUTPUT}.weight": table} if config.tie_word_embeddings else {}
    return _outline(checkpoint, family, config, dtype, shapes, mixtures, tied, None if tied else table)


def outline_of_head(
    checkpoint: GgufCheckpoint, config: Any, dtype: torch.dtype, beside: Mapping[str, tuple[int, ...]]
) -> Outline:
    """The outline of an MTP head, the last layer of a config. beside: path → shape of its tensors that are none of a
    layer's. ModelError if the file lacks a tensor, or has it in another shape."""
    family, last = decoder_family(config), config.num_hidden_layers - 1
    assert family is not None
    shapes = ShapesOnly({name: tensor.shape for name, tensor in checkpoint.tensors.items()}, dtype)
    w = Scope(shapes, config, dtype, family.norms)
    try:
        mixtures = _mixtures([family.layer(w.at(f"model.layers.{last}"), config, last)])
        for path, shape in beside.items():
            w.tensor(path, *shape)
        if not _fit(checkpoint, mixtures):
            raise ModelError("the shapes of the experts are others than the config asks for")
    except ModelError as error:
        raise ModelError(
            f"{checkpoint.directory} has no whole MTP head: {error}; download it again, or use --draft lookup"
        ) from error
    return _outline(checkpoint, family, config, dtype, shapes, mixtures, {}, None)


def _mixtures(layers: Iterable[DecoderLayer]) -> list[MoeLayer]:
    """Experts of the layers that have some."""
    return [block.layer for layer in layers if (block := layer.moe) is not None and block.layer is not None]


def _experts_of(layers: Iterable[MoeLayer]) -> dict[str, tuple[int, ...]]:
    return {f"{layer.name}.{part.name}": (layer.experts, *part.shape) for layer in layers for part in layer.parts}


def _fit(checkpoint: GgufCheckpoint, layers: list[MoeLayer]) -> bool:
    """Whether the file has the experts of all layers, in their shapes."""
    wanted = _experts_of(layers)
    return all(path in checkpoint and checkpoint.tensors[path].shape == shape for path, shape in wanted.items())


def _outline(
    checkpoint: GgufCheckpoint,
    family: Family,
    config: Any,
    dtype: torch.dtype,
    shapes: ShapesOnly,
    layers: list[MoeLayer],
    tied: Mapping[str, str],
    table: str | None,
) -> Outline:
    experts, dense, gate = _experts_of(layers), shapes.taken, family.gate(config)
    wide = {path: torch.float32 if path.endswith(family.wide) else dtype for path in dense}
    tensors = {path: DenseTensor(path, shape, wide[path], wide[path]) for path, shape in dense.items()}
    tensors |= {path: DenseTensor(None, dense[source], dtype, dtype) for path, source in tied.items()}
    return Outline(
        layers=layers,
        sources=tuple({part.name: (f"{layer.name}.{part.name}",) for part in layer.parts} for layer in layers),
        tensors=tensors,
        tied=tied,
        packable=tuple(
            path
            for path in shapes.matrices
            if math.prod(dense[f"{path}.weight"]) >= _SMALLEST and not path.endswith(_COMPUTED_WITH)
        ),
        table=table,
        tables={},
        joined={},
        dense_bytes=sum(math.prod(shape) * tensors[path].dtype.itemsize for path, shape in dense.items()),
        dense_keys=tuple(name for name in checkpoint.tensors if name not in experts),
        gate=None if gate is None else gate.stored,
        whole=True,
    )
