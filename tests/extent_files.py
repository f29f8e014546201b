"""A file of random experts with their extents, and what fills slots from it."""

from __future__ import annotations

import random
from pathlib import Path

import torch
import xxhash

from tiermoe.formats.expert_format import expert_format
from tiermoe.offload.disk import SlotFiller
from tiermoe.offload.reader import ExtentReader
from tiermoe.types import Extent, MoeLayer, Part, Segment

EXPERTS = 16
LAYER = MoeLayer("layer", EXPERTS, 2, (Part("weight", (64, 32)),))
FORM = expert_format(LAYER, 16, torch.float32, "")
SIZE = FORM.stored.nbytes


def write_experts(path: Path, shift: int = 0) -> list[Extent]:
    """`EXPERTS` random experts behind `shift` bytes of something else."""
    content = random.Random(5).randbytes(shift + EXPERTS * SIZE)
    path.write_bytes(content)
    extents = []
    for expert in range(EXPERTS):
        begin = shift + expert * SIZE
        digest = xxhash.xxh3_64_hexdigest(content[begin : begin + SIZE])
        extents.append(Extent((Segment(str(path), begin, SIZE, 0),), digest))
    return extents


def filler(extents: list[Extent]) -> SlotFiller:
    return SlotFiller(ExtentReader(), lambda key: extents[key.expert], lambda _: FORM)


def bytes_of(path: Path, extent: Extent) -> bytes:
    content = path.read_bytes()
    return b"".join(content[segment.offset : segment.offset + segment.nbytes] for segment in extent.segments)
