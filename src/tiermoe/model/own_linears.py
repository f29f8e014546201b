"""Linear layers in the types that they were published in: nothing of them is decoded or quantised anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from tiermoe.kernels import linear_for
from tiermoe.kernels.native.attention import PackedMatrix
from tiermoe.model.blueprint import Blueprint
from tiermoe.model.linear import PackedLinear
from tiermoe.quant.registry import encoding_named
from tiermoe.store.layout import ExpertFormat
from tiermoe.store.own_experts import OWN_BITS, label_of
from tiermoe.store.store import one_matrix


def own_linears(blueprint: Blueprint, device: str) -> dict[str, str]:
    """Paths of the linear layers that stay in the checkpoint's type on a device → the tensor that is their weight,
    which an output layer may share with the embedding. None of a checkpoint that does not come quantised, nor for a
    GPU, which has no kernels for these types."""
    if device != "cpu":
        return {}
    outline = blueprint.outline
    paths = [*outline.packable, *(path.removesuffix(".weight") for path in outline.tied)]
    weights = {path: outline.tensor(f"{path}.weight").key for path in paths}
    return {path: key for path, key in weights.items() if key is not None and _encoding(blueprint, key) is not None}


def shared_table(blueprint: Blueprint, device: str) -> str | None:
    """The tensor of an embedding whose matrix the output layer has in the checkpoint's type: rows of it are read from
    the file, and nothing else needs it."""
    tied = {path.removesuffix(".weight") for path in blueprint.outline.tied}
    return next((key for path, key in own_linears(blueprint, device).items() if path in tied), None)


def types_of(blueprint: Blueprint, keys: Iterable[str]) -> str:
    """The types of such tensors, for people: 'Q4_K, Q6_K'."""
    names = {_encoding(blueprint, key) for key in keys}
    return ", ".join(sorted({label_of(name) for name in names if name is not None}))


def own_bytes(blueprint: Blueprint, device: str) -> tuple[int, int]:
    """(bytes at 16 bits, bytes as they lie) of these layers."""
    plain = packed = 0
    for key in own_linears(blueprint, device).values():
        plain += math.prod(blueprint.checkpoint.tensors[key].shape) * blueprint.dtype.itemsize
        packed += _format(blueprint, key).slot.nbytes
    return plain, packed


def read_own(
    blueprint: Blueprint, device: str, bias_of: Callable[[str], Tensor | None]
) -> Iterator[tuple[str, PackedLinear]]:
    """These layers, each with its path, read one after the other and given the bias that `bias_of` has for its path.
    ModelError where one cannot be read."""
    for path, key in own_linears(blueprint, device).items():
        form = _format(blueprint, key)
        encoding, (out, in_) = form.encodings["weight"], form.layer.parts[0].out_in
        matrix = PackedMatrix(encoding, blueprint.checkpoint.fields(key), out, in_, bias_of(path))
        kernel = linear_for(encoding.name, "cpu", blueprint.dtype)
        yield path, PackedLinear(kernel, matrix, blueprint.dtype, blueprint.checkpoint.columns(key))


def attach_own(model: Any, blueprint: Blueprint, device: str) -> None:
    """Replaces these layers of a loaded transformers model."""
    for path, layer in read_own(blueprint, device, lambda path: model.get_submodule(path).bias):
        parent, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer)


def _encoding(blueprint: Blueprint, key: str) -> str | None:
    return blueprint.checkpoint.own_encoding(key)


def _format(blueprint: Blueprint, key: str) -> ExpertFormat:
    """How such a layer lies in memory."""
    encoding = _encoding(blueprint, key)
    assert encoding is not None
    out, in_ = blueprint.checkpoint.tensors[key].shape
    return ExpertFormat(one_matrix(key, out, in_), OWN_BITS, blueprint.dtype, {"weight": encoding_named(encoding)})
