"""Experts that are used where a checkpoint has them, in the types that they were published in: segments of its files.

A source names what a part's rows are made of: a tensor of all experts, of which each has a row, or, with `EACH` in the
place of the expert's number, a tensor for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from tiermoe.errors import ModelError
from tiermoe.quant.mixed import Halves, Values
from tiermoe.quant.published import Published
from tiermoe.quant.registry import Encoding, encoding_named
from tiermoe.quant.transposed4 import Transposed4
from tiermoe.store.layout import PAGE, format_from_names
from tiermoe.store.store import PackedLayer, Precision
from tiermoe.types import Extent, MoeLayer, Part, Segment

_ALIGNED = 32  # bytes; a part that begins at other ones is copied into its slot

OWN_BITS = 16
"""What precisions call the checkpoint's own."""

EACH = "{}"

Sources = Mapping[str, Sequence[str]]
"""Part name → the sources of its rows, one after the other."""


@dataclass(frozen=True, slots=True)
class LiesAs:
    """encoding: of rows, 'plain' for numbers that are values of their own. dtype: of the values. turned: the rows are
    the columns of what transformers has."""

    encoding: str
    dtype: torch.dtype
    turned: bool = False

    def for_people(self) -> str:
        """'Q4_K', 'FP8', 'float32'."""
        return str(self.dtype).removeprefix("torch.") if self.encoding == "plain" else label_of(self.encoding)


class OwnTypes(Protocol):
    """A checkpoint whose experts may be used as they lie."""

    directory: Path

    def ways(self, source: str, expert: int) -> list[LiesAs]:
        """How what is an expert's of a source lies."""

    def in_place(self, sources: Sequence[str], expert: int, offsets: Mapping[str, int]) -> list[Segment]:
        """Where it lies, field by field, to be placed one after the other at byte offsets[field] and on."""


def label_of(encoding: str) -> str:
    """What people call an encoding that weights were published in: 'Q4_K', 'MXFP4'."""
    return str(getattr(encoding_named(encoding), "label", encoding))


def comes_quantized(checkpoint: OwnTypes, sources: Sequence[Sources]) -> bool:
    """Whether some part of an expert is no plain values."""
    every = (each for layer in sources for names in layer.values() for each in names)
    return any(way.encoding != "plain" for source in every for way in checkpoint.ways(source, 0))


def own_precision(
    checkpoint: OwnTypes, layers: Sequence[MoeLayer], sources: Sequence[Sources], dtype: torch.dtype
) -> Precision:
    """All experts in place, for kernels that compute in `dtype`. Nothing of them is read, so no checksum is known.
    ModelError where kernels cannot take an expert as it lies."""
    packed = [_layer(checkpoint, layer, of, dtype) for layer, of in zip(layers, sources, strict=True)]
    return Precision(OWN_BITS, "", "any", in_place=True, layers=packed, derived=True)


def _layer(checkpoint: OwnTypes, layer: MoeLayer, sources: Sources, dtype: torch.dtype) -> PackedLayer:
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
    """By how many bytes a part, placed where a page begins, must be moved for its largest piece to lie in its pages as
    it does in the file's."""
    largest = max(segments, key=lambda segment: segment.nbytes)
    begins = (largest.offset - largest.at) % PAGE
    return 0 if begins % _ALIGNED else begins


def _named(checkpoint: OwnTypes, layer: MoeLayer, part: Part, sources: Sequence[str], dtype: torch.dtype) -> str | None:
    """What a store calls the encoding of a part, or the dtype of a bias; None where it lies in the compute dtype."""
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
            return ways[0].for_people()
    turned = any(way.turned != part.transposed for way in ways)
    if not part.is_matrix or turned or len(different) > 2 or (len(different) == 2 and len(ways) != 2):
        raise _refused(checkpoint, layer, part, " and ".join(way.for_people() for way in different), dtype)
    if len(different) == 2:
        return Halves(*(_encoding_of(way) for way in ways)).name
    encoding = _encoding_of(ways[0])
    return encoding.stacked(len(ways)).name if isinstance(encoding, Published | Transposed4) else encoding.name


def _ways(checkpoint: OwnTypes, sources: Sequence[str], expert: int) -> list[LiesAs]:
    return [way for source in sources for way in checkpoint.ways(source, expert)]


def _encoding_of(way: LiesAs) -> Encoding:
    return Values(way.dtype) if way.encoding == "plain" else encoding_named(way.encoding)


def _refused(checkpoint: OwnTypes, layer: MoeLayer, part: Part, what: str, dtype: torch.dtype) -> ModelError:
    return ModelError(
        f"{checkpoint.directory} has {part.name} of {layer.name} as {what}, which kernels that compute in "
        f"{str(dtype).removeprefix('torch.')} do not take in place; --bits 4 packs the experts"
    )
