"""A.X-K1: DeepSeek-V3's layers with a norm after the experts."""

from __future__ import annotations

from typing import Any

from tiermoe.model.attention.latent import latent
from tiermoe.model.families.deepseek import part_with_shared_experts
from tiermoe.model.families.deepseek_v3 import CORRECTION, rope_of, v3_router
from tiermoe.model.families.family import LatentFamily
from tiermoe.model.layer import Layer
from tiermoe.model.weights import Scope


class AxK1(LatentFamily):
    name, model_type = "A.X-K1", "axk1"

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        norm = w.norm("mlp.post_mlp_layernorm") if w.has("mlp.post_mlp_layernorm") else None
        return Layer(
            w.norm("input_layernorm"),
            latent(w.at("self_attn"), config, rope=rope_of(config)),
            w.norm("post_attention_layernorm"),
            part_with_shared_experts(w.at("mlp"), config, v3_router(config), CORRECTION, norm=norm),
        )
