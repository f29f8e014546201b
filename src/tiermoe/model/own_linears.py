"""Linear layers in the types that a GGUF file has them in: nothing of them is decoded or quantised anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tiermoe.kernels import linear_for
from tiermoe.kernels.native.attention import PackedMatrix
from tiermoe.model.blueprint import Blueprint
from tiermoe.model.linear import PackedLinear
from tiermoe.quant.gguf import PREFIX
from tiermoe.quant.registry import encoding_named
from tiermoe.store.gguf.checkpoint import GgufCheckpoint
from tiermoe.store.gguf.parameter import Rows
from tiermoe.tiers.reader import aligned_memory


def own_linears(blueprint: Blueprint, device: str) -> dict[str, str]:
    """Paths of the linear layers that stay in the file's type on a device → the parameter that is their weight, which
    an output layer may share with the embedding. None of other checkpoints, nor for a GPU, which has no kernels for
    these types."""
    if not isinstance(blueprint.checkpoint, GgufCheckpoint) or device != "cpu":
        return {}
    outline = blueprint.outline
    paths = [*outline.packable, *(path.removesuffix(".weight") for path in outline.tied)]
    weights = {path: outline.tensor(f"{path}.weight").key for path in paths}
    return {path: key for path, key in weights.items() if key is not None and _in_blocks(blueprint.checkpoint, key)}


def shared_table(blueprint: Blueprint, device: str) -> str | None:
    """The parameter of an embedding whose matrix the output layer has in the file's type: rows of it are read from the
    file, and nothing else needs it."""
    tied = {path.removesuffix(".weight") for path in blueprint.outline.tied}
    return next((key for path, key in own_linears(blueprint, device).items() if path in tied), None)


def types_of(blueprint: Blueprint, keys: Iterable[str]) -> str:
    """The types of parameters, for people: 'Q4_K, Q6_K'."""
    assert isinstance(blueprint.checkpoint, GgufCheckpoint)
    names = {str(blueprint.checkpoint.parameters[key].encoding()) for key in keys}
    return ", ".join(sorted(name.removeprefix(PREFIX).upper() for name in names))


def own_bytes(blueprint: Blueprint, device: str) -> tuple[int, int]:
    """(bytes at 16 bits, bytes as they lie) of these layers."""
    plain = packed = 0
    for key in own_linears(blueprint, device).values():
        assert isinstance(blueprint.checkpoint, GgufCheckpoint)
        plain += math.prod(blueprint.checkpoint.tensors[key].shape) * blueprint.dtype.itemsize
        packed += blueprint.checkpoint.stored_bytes(key)
    return plain, packed


def read_own(
    blueprint: Blueprint, device: str, bias_of: Callable[[str], Tensor | None]
) -> Iterator[tuple[str, PackedLinear]]:
    """These layers, each with its path, read one after the other into memory of one piece and given the bias that
    `bias_of` has for its path. ModelError where one cannot be read."""
    found = own_linears(blueprint, device)
    memory, begin = aligned_memory(own_bytes(blueprint, device)[1]), 0
    for path, key in found.items():
        checkpoint = blueprint.checkpoint
        assert isinstance(checkpoint, GgufCheckpoint)
        end = begin + checkpoint.stored_bytes(key)
        room = torch.frombuffer(memory[begin:end], dtype=torch.uint8)
        blocks = room.copy_(checkpoint.blocks(key).flatten()).view(checkpoint.tensors[key].shape[0], -1)
        begin = end
        yield path, _linear(blueprint, key, blocks, bias_of(path))


def attach_own(model: Any, blueprint: Blueprint, device: str) -> None:
    """Replaces these layers of a loaded transformers model."""
    for path, layer in read_own(blueprint, device, lambda path: model.get_submodule(path).bias):
        parent, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer)


def _linear(blueprint: Blueprint, key: str, blocks: Tensor, bias: Tensor | None) -> PackedLinear:
    assert isinstance(blueprint.checkpoint, GgufCheckpoint)
    name = blueprint.checkpoint.parameters[key].encoding()
    assert name is not None
    out, in_ = blueprint.checkpoint.tensors[key].shape
    matrix = PackedMatrix(encoding_named(name), {"blocks": blocks}, out, in_, bias)
    return PackedLinear(linear_for(name, "cpu", blueprint.dtype), matrix, blueprint.dtype)


def _in_blocks(checkpoint: GgufCheckpoint, key: str) -> bool:
    parameter = checkpoint.parameters[key]
    return isinstance(parameter, Rows) and len(parameter.shape) == 2 and parameter.encoding() not in (None, "plain")
