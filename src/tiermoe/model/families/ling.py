"""Ling 3.0: Kimi Delta Attention, latent attention with gated heads in every few layers, DeepSeek-V3's feed-forward
part."""

from __future__ import annotations

from typing import Any

from tiermoe.model.attention.base import Attention
from tiermoe.model.attention.kimi_delta import kimi_delta
from tiermoe.model.attention.latent import latent
from tiermoe.model.attention.linear import is_linear
from tiermoe.model.families.deepseek_v3 import rope_of
from tiermoe.model.families.family import LatentFamily
from tiermoe.model.families.kimi_linear import kimi_part
from tiermoe.model.layer import Layer
from tiermoe.model.weights import Scope


class Ling(LatentFamily):
    name, model_type = "Ling 3.0", "bailing_hybrid"
    latent_kv = False

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        own, heads = w.at("self_attn"), config.num_attention_heads
        attention: Attention
        if is_linear(config, index):
            attention = kimi_delta(own, config)
        else:
            attention = latent(own, config, rope=rope_of(config), gate="g_proj", gate_columns=heads)
        return Layer(
            w.norm("input_layernorm"),
            attention,
            w.norm("post_attention_layernorm"),
            kimi_part(w.at("mlp"), config),
        )
