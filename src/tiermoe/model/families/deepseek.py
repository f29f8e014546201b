"""DeepSeekMoE: grouped attention, a softmax router, shared experts; the first layers are dense."""

from __future__ import annotations

from typing import Any

from tiermoe.model.attention.grouped import grouped
from tiermoe.model.families.family import Family
from tiermoe.model.layer import Layer
from tiermoe.model.moe import DenseBlock, MoeBlock, dense, moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope


class DeepSeekMoe(Family):
    name, model_type = "DeepSeekMoE", "deepseek"
    plain_router = True

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        rule = RouterRule(config.num_experts_per_tok, normalise=bool(config.norm_topk_prob))
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index),
            w.norm("post_attention_layernorm"),
            part_with_shared_experts(w.at("mlp"), config, rule),
        )


def part_with_shared_experts(
    w: Scope, config: Any, rule: RouterRule, correction: str | None = None
) -> MoeBlock | DenseBlock:
    """The feed-forward part of DeepSeek's models and of those that follow them: shared experts beside the routed ones,
    as wide as so many of them, and dense in layers without a router. correction: as of `moe`."""
    if not w.has("gate.weight"):
        return dense(w, config.intermediate_size, config.hidden_act)
    inner = config.moe_intermediate_size
    shared = None
    if w.has("shared_experts"):
        shared = dense(w.at("shared_experts"), config.n_shared_experts * inner, config.hidden_act)
    return moe(w, rule, config.n_routed_experts, inner, correction=correction, shared=shared)
