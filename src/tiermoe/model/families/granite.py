"""Granite: GraniteMoE, with a shared expert, with sliding windows, and Granite 4, most layers of which are Mamba-2.
Multipliers scale embeddings, residuals, attention and logits."""

from __future__ import annotations

from typing import Any

import torch

from tiermoe.model.attention.base import Attention
from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.attention.linear import is_linear
from tiermoe.model.attention.mamba import MambaSizes, mamba, mamba_lacks
from tiermoe.model.families.family import Family
from tiermoe.model.layer import Layer
from tiermoe.model.moe import dense, moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope


class GraniteMoe(Family):
    name, model_type = "GraniteMoE", "granitemoe"
    normalised = True

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        rule, shared = RouterRule(config.num_experts_per_tok, scores="chosen"), None
        if w.has("shared_mlp"):
            own = w.at("shared_mlp")
            columns, names = config.shared_intermediate_size, ("input_linear",)
            shared = dense(own, columns, config.hidden_act, first=names, down="output_linear", fused=True)
        part = w.at("block_sparse_moe")
        return Layer(
            w.norm("input_layernorm"),
            self.attention(w, config, index),
            w.norm("post_attention_layernorm"),
            moe(part, rule, config.num_local_experts, config.intermediate_size, router="router", shared=shared),
            multiplier=float(config.residual_multiplier),
        )

    def attention(self, w: Scope, config: Any, index: int) -> Attention:
        """Of the layer at `w`."""
        return grouped(w.at("self_attn"), config, index, scale=float(config.attention_multiplier))

    def embedding_scale(self, config: Any, dtype: torch.dtype) -> float:
        return float(config.embedding_multiplier)

    def logits_divisor(self, config: Any) -> float:
        return float(config.logits_scaling)


class GraniteMoeShared(GraniteMoe):
    name, model_type = "GraniteMoE with a shared expert", "granitemoeshared"


class GraniteMoeWindows(GraniteMoe):
    name, model_type = "GraniteMoE with sliding windows", "granitemoe_swa"
    has_unrotated = True

    def attention(self, w: Scope, config: Any, index: int) -> Attention:
        return grouped(
            w.at("self_attn"),
            config,
            index,
            window=window_at(config, index),
            rotary=None if config.layer_rope_theta[index] else self.unrotated(config),
            scale=float(config.attention_multiplier),
            sinks=True,
        )

    def lacks(self, config: Any) -> str:
        bases = {base for base in config.layer_rope_theta if base}
        alike = bases <= {config.rope_parameters["rope_theta"]}
        return "" if alike else "layers with rotary embeddings of their own bases"


class Granite4(GraniteMoe):
    name, model_type = "Granite 4 (hybrid)", "granitemoehybrid"

    def attention(self, w: Scope, config: Any, index: int) -> Attention:
        if not is_linear(config, index):
            return super().attention(w, config, index)
        sizes = MambaSizes(
            config.mamba_n_heads,
            config.mamba_d_head,
            config.mamba_n_groups,
            config.mamba_d_state,
            config.mamba_d_conv - 1,
        )
        return mamba(w.at("mamba"), sizes)

    def lacks(self, config: Any) -> str:
        return mamba_lacks(config)
