"""Gated experts in the neuron unit without a model: to pack, and packed in a slot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from sources import RandomExperts
from tiermoe.formats.expert_format import ExpertFormat, PartViews
from tiermoe.formats.neurons import neuron_format
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.store import Source, Store
from tiermoe.types import MoeLayer, Part

HIDDEN, NEURONS, EXPERTS = 128, 160, 3
CODES = [(4, "hqq"), (4, "hqq-double"), (2, "hqq")]
"""Bits and quantiser of each kind of records."""


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


def by_the_page(records: torch.Tensor, bits: int, group: int, width: int, two_level: bool) -> torch.Tensor:
    """Records uint8 (n, R) in bfloat16 of halves of `width` weights, taken apart as docs/formats.md has them:
    float64 (n, 2, width)."""
    found = np.empty((len(records), 2, width))
    size, groups, columns = width * bits // 8, width // group, np.arange(width)
    for record, weights in zip(records.numpy(), found, strict=True):
        for half in (0, 1):
            codes = record[half * size :][:size][columns % size] >> columns // size * bits & (1 << bits) - 1
            if two_level:
                parameters = record[2 * size + half * (2 + 2 * groups) :]
                unit, steps, offsets = np.split(parameters[: 2 + 2 * groups], [2, 2 + groups])
                scale, zero = _bfloat16(unit) * steps, _bfloat16(unit) * offsets.view(np.int8)
            else:
                parameters = record[2 * size + half * 4 * groups :]
                scale, zero = np.split(_bfloat16(parameters[: 4 * groups]), 2)
            middle = 8 if bits == 4 else 0
            weights[half] = (codes.astype(int) - middle) * scale[columns // group] + zero[columns // group]
    return torch.from_numpy(found)


def _bfloat16(stored: np.ndarray) -> np.ndarray:
    return (stored.copy().view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def gated_store(root: Path, source: GatedExperts, dtype: str = "bfloat16") -> Store:
    root.mkdir(parents=True, exist_ok=True)
    store = Store(root, Source("random", "0123456789abcdef", "qwen3_moe", dtype), source.layers)
    store.save()
    return store


def packed(
    hidden: int, neurons: int, bits: int, dtype: torch.dtype, quantizer: str = "hqq", seed: int = 0
) -> tuple[ExpertFormat, dict[str, PartViews]]:
    """A random expert, and the views of its slot."""
    layer = MoeLayer("l", 1, 1, (Part("gate_up_proj", (2 * neurons, hidden)), Part("down_proj", (hidden, neurons))))
    form = neuron_format(layer, bits, dtype, quantizer)
    generator = torch.Generator().manual_seed(hidden + neurons + seed)
    tensors = {
        part.name: (torch.randn(part.shape, generator=generator) / hidden**0.5).to(dtype) for part in form.layer.parts
    }
    stored, slot = (torch.zeros(layout.nbytes, dtype=torch.uint8) for layout in (form.stored, form.slot))
    form.encode(tensors, QUANTIZERS[quantizer], stored)
    form.widen(stored, slot)
    return form, form.slot.views(slot)


def dense(form: ExpertFormat, views: dict[str, PartViews]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """W1, W3 (I, H) and W2 (H, I) as the slot holds them, float32."""
    neurons, hidden = form.layer.parts[0].shape
    gate = form.encodings["gate"].decode(views["gate"], neurons, hidden, form.dtype).float()
    both = form.encodings["neurons"].decode(views["neurons"], neurons, 2 * hidden, form.dtype).float()
    return gate, both[:, :hidden], both[:, hidden:].t()
