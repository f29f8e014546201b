"""Jamba: Mamba-1, attention without positions in every few layers, experts in every other, a softmax router."""

from __future__ import annotations

from typing import Any

from tiermoe.model.attention.base import Attention
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.attention.linear import is_linear
from tiermoe.model.attention.mamba import mamba_lacks
from tiermoe.model.attention.mamba_1 import Mamba1Sizes, mamba_1
from tiermoe.model.families.family import Family
from tiermoe.model.layer import Layer
from tiermoe.model.moe import DenseBlock, MoeBlock, dense, moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope


class Jamba(Family):
    name, model_type = "Jamba", "jamba"
    continues = False
    normalised = False
    final_norm = "model.final_layernorm"

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        attention: Attention
        if is_linear(config, index):
            channels, kept = config.mamba_expand * config.hidden_size, config.mamba_d_conv - 1
            attention = mamba_1(w.at("mamba"), Mamba1Sizes(channels, config.mamba_d_state, kept, config.mamba_dt_rank))
        else:
            attention = grouped(w.at("self_attn"), config, index)
        return Layer(
            w.norm("input_layernorm"),
            attention,
            w.norm("pre_ff_layernorm"),
            self.part(w.at("feed_forward"), config),
        )

    def part(self, w: Scope, config: Any) -> MoeBlock | DenseBlock:
        """The feed-forward part: dense in the layers that have no router."""
        if not w.has("router.weight"):
            return dense(w, config.intermediate_size, config.hidden_act)
        rule = RouterRule(config.num_experts_per_tok)
        return moe(w, rule, config.num_experts, config.intermediate_size, router="router")

    def lacks(self, config: Any) -> str:
        return mamba_lacks(config)
