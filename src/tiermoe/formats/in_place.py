"""Experts used where a checkpoint has them, in the types that they were published in: segments of its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tiermoe.errors import ModelError
from tiermoe.formats.checkpoint_quant import Transposed4
from tiermoe.formats.encoding import OfMatrices
from tiermoe.formats.expert_format import PAGE, format_from_names
from tiermoe.formats.gguf_types import Nvfp4
from tiermoe.formats.plain import Halves, Values
from tiermoe.formats.registry import encoding_named
from tiermoe.formats.source import EACH, Sources, StoredAs, TensorSource
from tiermoe.formats.store import PackedLayer, Precision
from tiermoe.types import Extent, MoeLayer, Part, Segment

_REORDERED = Nvfp4 | Transposed4  # on the way into a slot, where only whole matrices are
_ALIGNED = 32  # bytes; a part that begins elsewhere is copied into its slot

OWN_BITS = 16
"""The bits by which precisions call the checkpoint's own."""


def comes_quantized(checkpoint: TensorSource, sources: Sequence[Sources]) -> bool:
    """Whether some part of an expert is not plain values."""
    every = (each for layer in sources for names in layer.values() for each in names)
    return any(way.encoding != "plain" for source in every for way in checkpoint.stored_as(source, 0))


def in_place_precision(
    checkpoint: TensorSource, layers: Sequence[MoeLayer], sources: Sequence[Sources], dtype: torch.dtype
) -> Precision:
    """The precision of all experts in place, for kernels that compute in `dtype`. No expert is read, so that no
    checksum is known. ModelError where kernels cannot take an expert as it is stored."""
    packed = [_layer(checkpoint, layer, of, dtype) for layer, of in zip(layers, sources, strict=True)]
    return Precision(OWN_BITS, "", in_place=True, layers=packed, derived=True)


def _layer(checkpoint: TensorSource, layer: MoeLayer, sources: Sources, dtype: torch.dtype) -> PackedLayer:
    names = {}
    for part in layer.parts:
        name = _named(checkpoint, layer, part, sources.get(part.name, ()), dtype)
        if name is not None:
            names[part.name] = name
    form = format_from_names(layer, OWN_BITS, dtype, names, {part.name: 0 for part in layer.parts if part.is_matrix})
    places: dict[str, dict[str, int]] = {}
    sizes: dict[str, int] = {}
    for placed in form.stored.fields:
        places.setdefault(placed.part, {})[placed.field.name] = placed.offset
        sizes[placed.part] = sizes.get(placed.part, 0) + placed.field.nbytes
    packed = PackedLayer(names, [], [0.0] * layer.experts)
    for expert in range(layer.experts):
        segments: list[Segment] = []
        packed.in_page.append({})
        for part in layer.parts:
            found = checkpoint.in_place(sources[part.name], expert, places[part.name])
            if sum(segment.nbytes for segment in found) != sizes[part.name]:
                raise _refused(checkpoint, layer, part, "matrices that do not end where their scales do", dtype)
            if part.is_matrix:
                packed.in_page[-1][part.name] = begins = _in_page(found)
                found = [replace(segment, at=segment.at + begins) for segment in found]
            segments += found
        packed.extents.append(Extent(tuple(segments), ""))
    return packed


def _in_page(segments: Sequence[Segment]) -> int:
    """By how many bytes a part, placed where a page begins, must be moved for its largest piece to have the place in
    its page that it has in the file's."""
    largest = max(segments, key=lambda segment: segment.nbytes)
    begins = (largest.offset - largest.at) % PAGE
    return 0 if begins % _ALIGNED else begins


def _named(
    checkpoint: TensorSource, layer: MoeLayer, part: Part, sources: Sequence[str], dtype: torch.dtype
) -> str | None:
    """The name in a store of a part's encoding, or of a bias's dtype; None where it is in the compute dtype."""
    if not sources:
        raise _refused(checkpoint, layer, part, "several tensors that are converted into it", dtype)
    ways = _ways(checkpoint, sources, 0)
    if any(EACH in source for source in sources):
        for expert in range(1, layer.experts):
            if _ways(checkpoint, sources, expert) != ways:
                raise _refused(checkpoint, layer, part, "another type in some experts than in others", dtype)
    different = list(dict.fromkeys(ways))
    if all(way.encoding == "plain" for way in ways) and len(different) == 1:
        if ways[0].dtype == dtype:
            return None
        if not part.is_matrix:
            return ways[0].label
    transposed = any(way.transposed != part.transposed for way in ways)
    encodings = [Values(way.dtype) if way.encoding == "plain" else encoding_named(way.encoding) for way in different]
    halves = len(different) == len(ways) == 2 and not any(isinstance(each, _REORDERED) for each in encodings)
    if not part.is_matrix or transposed or (len(different) > 1 and not halves):
        raise _refused(checkpoint, layer, part, " and ".join(way.label for way in different), dtype)
    if halves:
        return Halves(*encodings).name
    (encoding,) = encodings
    if isinstance(encoding, OfMatrices):
        return encoding.stacked(len(ways)).name
    return encoding.name


def _ways(checkpoint: TensorSource, sources: Sequence[str], expert: int) -> list[StoredAs]:
    return [way for source in sources for way in checkpoint.stored_as(source, expert)]


def _refused(checkpoint: TensorSource, layer: MoeLayer, part: Part, what: str, dtype: torch.dtype) -> ModelError:
    return ModelError(
        f"{checkpoint.directory} has {part.name} of {layer.name} as {what}, which kernels that compute in "
        f"{str(dtype).removeprefix('torch.')} do not take in place; --bits 4 packs the experts"
    )
