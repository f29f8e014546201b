"""Qwen3-Next and Qwen3.5: linear attention by the gated delta rule, grouped attention with gated heads in every few
layers, centred norms, and Qwen2-MoE's feed-forward part."""

from __future__ import annotations

from typing import Any

from tiermoe.model.attention.grouped import GroupedAttention, grouped
from tiermoe.model.attention.linear import gated_delta, is_linear
from tiermoe.model.families.family import Family, HeadFormat
from tiermoe.model.families.qwen2_moe import part_with_gated_expert
from tiermoe.model.layer import Layer
from tiermoe.model.weights import NormKind, Scope

MTP_NAMES = {
    "mtp.layers.0.": "",
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
}
"""Names of an MTP head beside the model's layers (transformers' `MtpModel`, vLLM's `qwen3_next_mtp`)."""


class Qwen3Next(Family):
    name, model_type = "Qwen3-Next", "qwen3_next"
    plain_router = True
    norms = NormKind(centred=True)
    mtp_head = HeadFormat(MTP_NAMES, {"layer_types": "full_attention"})

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        linear = is_linear(config, index)
        return Layer(
            w.norm("input_layernorm"),
            gated_delta(w.at("linear_attn"), config) if linear else self.attention(w.at("self_attn"), config, index),
            w.norm("post_attention_layernorm"),
            part_with_gated_expert(w.at("mlp"), config, self.renormalises(config)),
        )

    def attention(self, w: Scope, config: Any, index: int) -> GroupedAttention:
        return grouped(w, config, index, norms=("q_norm", "k_norm"), gated=True)


class Qwen35Moe(Qwen3Next):
    """Its linear attention has a matrix for each part of the projection."""

    name, model_type = "Qwen3.5-MoE", "qwen3_5_moe_text"
    normalised = True
