"""DeepSeek-V2: latent attention, a softmax router that may choose within groups, shared experts."""

from __future__ import annotations

from typing import Any

from tiermoe.model.attention.latent import latent
from tiermoe.model.families.deepseek import part_with_shared_experts
from tiermoe.model.families.family import LatentFamily
from tiermoe.model.layer import Layer
from tiermoe.model.rotary import rope_complex
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope


class DeepSeekV2(LatentFamily):
    name, model_type = "DeepSeek-V2", "deepseek_v2"
    normalised = False
    wide_angles = True

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        grouped = config.topk_method == "group_limited_greedy"
        rule = RouterRule(
            config.num_experts_per_tok,
            wide=True,
            rounded=False,
            groups=config.n_group if grouped else 1,
            kept_groups=config.topk_group if grouped else 1,
            best_of_group=True,
            scale=float(config.routed_scaling_factor),
        )
        return Layer(
            w.norm("input_layernorm"),
            latent(w.at("self_attn"), config, rope=rope_complex),
            w.norm("post_attention_layernorm"),
            part_with_shared_experts(w.at("mlp"), config, rule),
        )
