"""Experts that are used where a GGUF file has them: three segments an expert, in the types of the file."""

from __future__ import annotations

import torch

from tiermoe.errors import ModelError
from tiermoe.store.gguf.checkpoint import GgufCheckpoint
from tiermoe.store.gguf.parameter import Parameter, Stacked
from tiermoe.store.layout import format_from_names
from tiermoe.store.store import PackedLayer, Precision
from tiermoe.types import Extent, MoeLayer, Part, Segment

OWN_BITS = 16
"""What precisions call the checkpoint's own."""


def own_precision(checkpoint: GgufCheckpoint, layers: list[MoeLayer], dtype: torch.dtype) -> Precision:
    """All experts in place, for kernels that compute in `dtype`. Nothing of them is read, so no checksum is known.
    ModelError where kernels cannot take an expert as it lies."""
    packed = [_layer(checkpoint, layer, dtype) for layer in layers]
    return Precision(OWN_BITS, "", "any", in_place=True, layers=packed, derived=True)


def _layer(checkpoint: GgufCheckpoint, layer: MoeLayer, dtype: torch.dtype) -> PackedLayer:
    names = {}
    for part in layer.parts:
        name = _named(checkpoint, layer, part, dtype)
        if name is not None:
            names[part.name] = name
    form = format_from_names(layer, OWN_BITS, dtype, names)
    offsets = {placed.part: placed.offset for placed in form.stored.fields}

    def extent(expert: int) -> Extent:
        segments: list[Segment] = []
        for part in layer.parts:
            segments += checkpoint.in_place(f"{layer.name}.{part.name}", expert, offsets[part.name])
        return Extent(tuple(segments), "")

    return PackedLayer(names, [extent(expert) for expert in range(layer.experts)], [0.0] * layer.experts)


def _named(checkpoint: GgufCheckpoint, layer: MoeLayer, part: Part, dtype: torch.dtype) -> str | None:
    """What a store calls the encoding of a part, or the dtype of a bias; None where it lies in the compute dtype."""
    parameter = checkpoint.parameters[f"{layer.name}.{part.name}"]
    encoding = parameter.encoding()
    if encoding == "plain" and parameter.dtype == dtype:
        return None
    if encoding == "plain" and not part.is_matrix:
        return str(parameter.dtype).removeprefix("torch.")
    if encoding is None or encoding == "plain":
        raise ModelError(
            f"{checkpoint.directory} has {part.name} of {layer.name} as {_types(parameter)}, which kernels that "
            f"compute in {str(dtype).removeprefix('torch.')} do not take in place; --bits 4 packs the experts"
        )
    return encoding


def _types(parameter: Parameter) -> str:
    assert isinstance(parameter, Stacked)
    return " and ".join(dict.fromkeys(tensor.kind.name for tensor in parameter.tensors))
