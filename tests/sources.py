"""Experts to pack without a model: random weights, and a count of what was read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tiermoe.formats.store import Source, Store
from tiermoe.offload.reader import ExtentReader, aligned_memory
from tiermoe.types import ExpertKey, MoeLayer, Part, Segment

EXPERTS = 4
PARTS = (Part("gate_up_proj", (96, 64)), Part("down_proj", (64, 48)), Part("bias", (64,)))


def layers(count: int = 3) -> list[MoeLayer]:
    return [MoeLayer(f"model.layers.{index}.mlp.experts", EXPERTS, 2, PARTS) for index in range(count)]


class RandomExperts:
    """`formats.source.ExpertSource`; `before` is called before each read and may raise."""

    def __init__(self, count: int = 3, seed: int = 0, before: Callable[[int, int], None] = lambda *_: None) -> None:
        self.layers = layers(count)
        self.reads: list[tuple[int, int]] = []
        self._seed = seed
        self._before = before

    def read(self, layer: int, expert: int) -> Mapping[str, torch.Tensor]:
        self._before(layer, expert)
        self.reads.append((layer, expert))
        generator = torch.Generator().manual_seed(self._seed * 10_000 + layer * 100 + expert)
        return {part.name: torch.randn(part.shape, generator=generator).to(torch.bfloat16) for part in PARTS}

    def in_place(self, layer: int, expert: int) -> list[Segment] | None:
        return None


def empty_store(root: Path, fingerprint: str = "0123456789abcdef", count: int = 3) -> Store:
    root.mkdir(parents=True, exist_ok=True)
    store = Store(root, Source("random", fingerprint, "qwen3_moe", "bfloat16"), layers(count))
    store.save()
    return store


def contents(root: Path) -> dict[str, bytes]:
    """All files of a store but its lock."""
    return {file.name: file.read_bytes() for file in sorted(root.iterdir()) if file.name != ".lock"}


def stored(store: Store, key: str, layer: int, expert: int) -> torch.Tensor:
    """The bytes of an expert in a store, checked."""
    form, reader = store.expert_format(key, layer), ExtentReader()
    memory = aligned_memory(form.stored.nbytes)
    reader.read(store.precisions[key].layers[layer].extents[expert], memory, ExpertKey(layer, expert, form.bits))
    reader.close()
    return torch.frombuffer(memory, dtype=torch.uint8)
