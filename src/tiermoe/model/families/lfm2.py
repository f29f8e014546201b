"""LFM2-MoE: short convolutions, grouped attention in some layers, a sigmoid router with a correction; the first layers
are dense."""

from __future__ import annotations

from typing import Any

from tiermoe.model.attention.base import Attention
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.attention.short_convolution import short_convolution
from tiermoe.model.families.family import Family
from tiermoe.model.layer import Layer
from tiermoe.model.moe import DenseBlock, MoeBlock, dense, moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import NormKind, Scope


class Lfm2Moe(Family):
    name, model_type = "LFM2-MoE", "lfm2_moe"
    final_norm = "model.embedding_norm"
    norms = NormKind(epsilon="norm_eps")

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        attention: Attention
        if config.layer_types[index] == "conv":
            attention = short_convolution(w.at("conv"), config)
        else:
            norms = ("q_layernorm", "k_layernorm")
            attention = grouped(w.at("self_attn"), config, index, norms=norms, output="out_proj")
        return Layer(
            w.norm("operator_norm"), attention, w.norm("ffn_norm"), self.part(w.at("feed_forward"), config)
        )

    def part(self, w: Scope, config: Any) -> MoeBlock | DenseBlock:
        """The feed-forward part: dense in the layers that have no router."""
        if not w.has("gate.weight"):
            return dense(w, config.intermediate_size, "silu", first=("w1", "w3"), down="w2")
        rule = RouterRule(
            config.num_experts_per_tok,
            scores="sigmoid",
            normalise=bool(config.norm_topk_prob),
            epsilon=1e-6,
            scale=float(config.routed_scaling_factor),
        )
        return moe(w, rule, config.num_experts, config.moe_intermediate_size, correction="expert_bias")

    def activation(self, config: Any) -> str:
        return "silu"
