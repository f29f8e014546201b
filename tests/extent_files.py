"""Files that slots are filled from: random experts with their extents, random pages; and what damages one."""

from __future__ import annotations

import random
from pathlib import Path

import torch
import xxhash

from tiermoe.formats.expert_format import PAGE, expert_format
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


def write_pages(path: Path) -> Path:
    """Some pages and a torn last one."""
    path.write_bytes(random.Random(0).randbytes(9 * PAGE + 1000))
    return path


def filler(extents: list[Extent]) -> SlotFiller:
    return SlotFiller(ExtentReader(), lambda key: extents[key.expert], lambda _: FORM)


def flip(path: Path | str, at: int) -> None:
    """Turns a bit of the byte at `at`."""
    with open(path, "r+b") as handle:
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ 1]))


def bytes_of(path: Path, extent: Extent) -> bytes:
    content = path.read_bytes()
    return b"".join(content[segment.offset : segment.offset + segment.nbytes] for segment in extent.segments)
