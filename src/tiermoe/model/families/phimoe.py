"""Phi-MoE: grouped attention, layer norms, and a router that chooses two experts by sparse mixing."""

from __future__ import annotations

from typing import Any

from tiermoe.model.attention.grouped import grouped
from tiermoe.model.families.family import Family
from tiermoe.model.layer import Layer
from tiermoe.model.moe import moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import NormKind, Scope


class PhiMoe(Family):
    name, model_type = "Phi-MoE", "phimoe"
    normalised = False
    norms = NormKind(layer=True)

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        rule = RouterRule(2, scores="sparsemixer", jitter=float(config.router_jitter_noise))
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, window=config.sliding_window),
            w.norm("post_attention_layernorm"),
            moe(w.at("mlp"), rule, config.num_local_experts, config.intermediate_size, router="router"),
        )
