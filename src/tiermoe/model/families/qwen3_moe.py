"""Qwen3-MoE: grouped attention with normed heads, a softmax router."""

from __future__ import annotations

from typing import Any

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.families.family import Family
from tiermoe.model.families.fields import (
    Config,
    dense_columns,
    dense_layers,
    expert_columns,
    expert_count,
    grouped_fields,
)
from tiermoe.model.families.names import Gguf, block_names
from tiermoe.model.layer import Layer
from tiermoe.model.moe import DenseBlock, MoeBlock, moe_or_dense
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope


class Qwen3Moe(Family):
    name, model_type = "Qwen3-MoE", "qwen3_moe"
    gguf = Gguf(("qwen3moe",), block_names())
    plain_router = True

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        norms = ("q_norm", "k_norm")
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, window=config.sliding_window, norms=norms),
            w.norm("post_attention_layernorm"),
            self.part(w.at("mlp"), config),
        )

    def part(self, w: Scope, config: Any) -> MoeBlock | DenseBlock:
        """The feed-forward part: dense in the layers that have no router."""
        return moe_or_dense(
            w,
            RouterRule(config.num_experts_per_tok, normalise=bool(config.norm_topk_prob)),
            config.hidden_act,
            experts=config.num_experts,
            inner=config.moe_intermediate_size,
            dense_inner=config.intermediate_size,
        )

    def config(self, file: GgufFile) -> Config:
        return {
            **grouped_fields(file),
            "model_type": "qwen3_moe",
            "num_experts": expert_count(file),
            "moe_intermediate_size": expert_columns(file),
            "intermediate_size": dense_columns(file),
            "mlp_only_layers": dense_layers(file),
            "norm_topk_prob": True,  # models/qwen3moe.cpp
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        }
