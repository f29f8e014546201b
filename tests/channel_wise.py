"""EdgeMoE's quantizer, written from the paper (section 3.2): what a weight becomes, not how it is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tiermoe.types import MoeLayer


def channel_wise(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """weight (out, in) rounded to multiples of scale = largest magnitude of the channel / largest code (1, 7, 127),
    to the even one of two that are as near: the paper leaves that open, and weights of 8 significant bits often are."""
    if bits == 16:
        return weight
    scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (weight / scale).round() * scale


def round_experts(plain: Any, layers: Sequence[MoeLayer], table: Mapping[tuple[int, int], int]) -> None:
    """Overwrites a plain model's experts by what the bits of `table` make of them: stacked parameters, or a module for
    each (Switch)."""
    for index, layer in enumerate(layers):
        names = dict(plain.named_parameters())
        for part in layer.parts:
            for expert in range(layer.experts):
                stacked = names.get(f"{layer.name}.{part.name}")
                held = (
                    names[f"{layer.name}.expert_{expert}.{part.name}"].data if stacked is None else stacked.data[expert]
                )
                held.copy_(channel_wise(held.float(), table[index, expert]))
