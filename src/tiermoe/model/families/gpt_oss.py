"""gpt-oss: grouped attention with sinks, a window in every other layer, a router that weighs the chosen experts alone,
experts with biases and a clamped gate."""

from __future__ import annotations

from typing import Any

from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.families.family import Family
from tiermoe.model.layer import Layer
from tiermoe.model.moe import moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import NormKind, Scope


class GptOss(Family):
    name, model_type = "gpt-oss", "gpt_oss"
    normalised = True
    norms = NormKind(late=True, by_kernel=False)  # a prompt keeps the bits of torch's operations

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        rule = RouterRule(config.num_experts_per_tok, scores="chosen")
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, window=window_at(config, index), sinks=True),
            w.norm("post_attention_layernorm"),
            moe(w.at("mlp"), rule, config.num_local_experts, config.intermediate_size, router="router", biased=True),
        )
