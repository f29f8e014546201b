"""Nemotron-H (Nemotron 3): a layer is Mamba-2, attention without positions, a dense block, or experts without a gate,
which may take fewer columns than hidden states have; DeepSeek-V3's router."""

from __future__ import annotations

from typing import Any

from tiermoe.model.attention.base import Attention
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.attention.linear import is_linear
from tiermoe.model.attention.mamba import MambaSizes, mamba, mamba_lacks
from tiermoe.model.families.deepseek_v3 import CORRECTION, v3_router
from tiermoe.model.families.family import Family
from tiermoe.model.layer import AttentionLayer, FeedForwardLayer
from tiermoe.model.moe import DenseBlock, MoeBlock, dense, moe
from tiermoe.model.weights import NormKind, Scope

_FIRST = ("up_proj",)


class NemotronH(Family):
    name, model_type = "Nemotron-H (Nemotron 3)", "nemotron_h"
    embedding, final_norm = "model.embeddings", "model.norm_f"
    norms = NormKind(late=True, epsilon="layer_norm_epsilon")

    def layer(self, w: Scope, config: Any, index: int) -> AttentionLayer | FeedForwardLayer:
        norm, mixer = w.norm("norm"), w.at("mixer")
        if config.layer_types[index] in ("moe", "mlp"):
            return FeedForwardLayer(norm, self.part(mixer, config))
        attention: Attention
        if is_linear(config, index):
            sizes = MambaSizes(
                config.mamba_num_heads,
                config.mamba_head_dim,
                config.n_groups,
                config.ssm_state_size,
                config.conv_kernel - 1,
            )
            attention = mamba(mixer, sizes, float(config.time_step_min))
        else:
            attention = grouped(mixer, config, index)
        return AttentionLayer(norm, attention)

    def part(self, w: Scope, config: Any) -> MoeBlock | DenseBlock:
        """A dense block, or experts."""
        activation, width = config.mlp_hidden_act, config.moe_latent_size
        if not w.has("gate.weight"):
            return dense(w, config.intermediate_size, activation, first=_FIRST)
        shared, columns = None, config.moe_shared_expert_intermediate_size
        if w.has("shared_experts"):
            shared = dense(w.at("shared_experts"), columns, activation, first=_FIRST)
        return moe(
            w,
            v3_router(config),
            config.n_routed_experts,
            config.moe_intermediate_size,
            correction=CORRECTION,
            shared=shared,
            latent=("fc1_latent_proj", "fc2_latent_proj", width) if width else None,
            gateless=True,
        )

    def lacks(self, config: Any) -> str:
        return mamba_lacks(config)
