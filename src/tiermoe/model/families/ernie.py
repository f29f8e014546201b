"""ERNIE 4.5: grouped attention that rotates pairs of columns in float32, a softmax router with a correction, shared
experts; the first layers are dense."""

from __future__ import annotations

from typing import Any

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.families.family import Family
from tiermoe.model.families.fields import (
    Config,
    dense_columns,
    expert_columns,
    expert_count,
    grouped_fields,
    layer_count,
    leading_dense,
)
from tiermoe.model.families.names import Gguf, block_names
from tiermoe.model.layer import Layer
from tiermoe.model.moe import DenseBlock, MoeBlock, moe_or_dense
from tiermoe.model.rotary import rope_complex
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope

NAMES = block_names(correction="gate.moe_statics.e_score_correction_bias", shared="shared_experts")
"""Tensors of a block → modules of a layer."""


class Ernie(Family):
    name, model_type = "ERNIE 4.5", "ernie4_5_moe"
    gguf = Gguf(("ernie4_5-moe",), NAMES)
    normalised = True
    wide_angles = True

    wide = ("e_score_correction_bias", "mlp.gate.weight")

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, rope=rope_complex),
            w.norm("post_attention_layernorm"),
            self.part(w.at("mlp"), config),
        )

    def part(self, w: Scope, config: Any) -> MoeBlock | DenseBlock:
        """The feed-forward part: dense in the layers that have no router."""
        return moe_or_dense(
            w,
            RouterRule(config.num_experts_per_tok, normalise=True, epsilon=1e-20, wide=True),
            config.hidden_act,
            experts=config.moe_num_experts,
            inner=config.moe_intermediate_size,
            dense_inner=config.intermediate_size,
            shared_inner=(config.moe_num_shared_experts or 0) * config.moe_intermediate_size,
            correction="gate.moe_statics.e_score_correction_bias",
        )

    def config(self, file: GgufFile) -> Config:
        first = leading_dense(file)
        return {
            **grouped_fields(file),
            "model_type": "ernie4_5_moe",
            "moe_num_experts": expert_count(file),
            "moe_num_shared_experts": file.count("expert_shared_count", 0),
            "moe_intermediate_size": expert_columns(file),
            "intermediate_size": dense_columns(file),
            "moe_layer_start_index": first,
            "moe_layer_end_index": layer_count(file) - 1,
            "moe_layer_interval": 1,
        }

