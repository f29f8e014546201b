"""Kimi Linear: Kimi Delta Attention, latent attention without positions in every few layers, DeepSeek-V3's feed-forward
part (arXiv:2510.26692)."""

from __future__ import annotations

from typing import Any

from tiermoe.model.attention.kimi_delta import kimi_delta
from tiermoe.model.attention.latent import latent
from tiermoe.model.attention.linear import is_linear
from tiermoe.model.families.deepseek_v3 import CORRECTION, v3_router
from tiermoe.model.families.family import LatentFamily
from tiermoe.model.layer import Layer
from tiermoe.model.moe import DenseBlock, MoeBlock, dense, moe
from tiermoe.model.rotary import rope_halves
from tiermoe.model.weights import Scope


class KimiLinear(LatentFamily):
    name, model_type = "Kimi Linear", "kimi_linear"
    latent_kv = False

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        own = w.at("self_attn")
        linear = is_linear(config, index)
        return Layer(
            w.norm("input_layernorm"),
            kimi_delta(own, config) if linear else latent(own, config, rope=rope_halves),
            w.norm("post_attention_layernorm"),
            kimi_part(w.at("mlp"), config),
        )


def kimi_part(w: Scope, config: Any) -> MoeBlock | DenseBlock:
    """DeepSeek-V3's feed-forward part by the names of Kimi Linear's config."""
    if not w.has("gate.weight"):
        return dense(w, config.intermediate_size, config.hidden_act)
    inner, shared = config.moe_intermediate_size, None
    if w.has("shared_experts"):
        shared = dense(w.at("shared_experts"), config.num_shared_experts * inner, config.hidden_act)
    return moe(w, v3_router(config), config.num_experts, inner, correction=CORRECTION, shared=shared)
