"""Gated experts to pack in the neuron unit without a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from sources import RandomExperts
from tiermoe.formats.store import Source, Store
from tiermoe.types import MoeLayer, Part

HIDDEN, NEURONS, EXPERTS = 128, 160, 3


class GatedExperts(RandomExperts):
    """Random experts of a gate-and-up and a down matrix, without a bias."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, count: int = 2) -> None:
        super().__init__(count)
        parts = (Part("gate_up_proj", (2 * NEURONS, HIDDEN)), Part("down_proj", (HIDDEN, NEURONS)))
        self.layers = [MoeLayer(f"layers.{index}.mlp.experts", EXPERTS, 2, parts) for index in range(count)]
        self._dtype = dtype

    def read(self, layer: int, expert: int) -> Mapping[str, torch.Tensor]:
        self.reads.append((layer, expert))
        generator = torch.Generator().manual_seed(layer * 100 + expert)
        return {
            part.name: torch.randn(part.shape, generator=generator).to(self._dtype) for part in self.layers[layer].parts
        }


def gated_store(root: Path, source: GatedExperts, dtype: str = "bfloat16") -> Store:
    root.mkdir(parents=True, exist_ok=True)
    store = Store(root, Source("random", "0123456789abcdef", "qwen3_moe", dtype), source.layers)
    store.save()
    return store
