"""Llama 4: attention in chunks, layers without positions whose queries have a temperature, and one expert a token,
whose input is weighted and not its output."""

from __future__ import annotations

from typing import Any

import torch

from tiermoe.model.architecture import Architecture
from tiermoe.model.rotary import Temperature
from tiermoe.model.routers import RouterRule


def llama4_router(config: Any) -> RouterRule:
    return RouterRule(config.num_experts_per_tok, scores="sigmoid")


def llama4_lacks(config: Any) -> str:
    """The parts of a config that the published models lack; empty: none."""
    if config.num_experts_per_tok != 1:
        return "several experts a token"
    kinds = zip(config.layer_types, config.no_rope_layers, strict=False)
    if any((kind == "chunked_attention") != bool(rotated) for kind, rotated in kinds):
        return "positions without chunks, or chunks without them"
    return "" if config.attention_chunk_size else "chunks of no size"


def _unrotated(config: Any, layer: int) -> bool:
    return not config.no_rope_layers[layer]


def _temperature(config: Any) -> Temperature | None:
    if not config.attn_temperature_tuning:
        return None
    every, strength = config.floor_scale, config.attn_scale
    return lambda positions: torch.log1p(torch.floor((positions.float() + 1.0) / every)) * strength + 1.0


LLAMA4 = Architecture(
    llama4_router,
    block="feed_forward",
    gate="router",
    shared="shared_expert",
    weighs_input=True,
    window="chunk",
    rope="complex",
    unrotated=_unrotated,
    temperature=_temperature,
    norms_rotated=True,
    plain_norms=True,
    lacks=llama4_lacks,
)
