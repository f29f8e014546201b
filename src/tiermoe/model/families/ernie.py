"""ERNIE 4.5: grouped attention that rotates pairs of columns in float32, a softmax router with a correction, shared
experts; the first layers are dense."""

from __future__ import annotations

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.families.family import Family
from tiermoe.model.families.gguf import Config, Gguf, block_names, grouped_fields
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import moe_or_dense
from tiermoe.model.rotary import rope_complex
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope

_CORRECTION = "gate.moe_statics.e_score_correction_bias"
NAMES = block_names(correction=_CORRECTION, shared="shared_experts")
"""Tensors of a block → modules of a layer."""


class Ernie(Family):
    name, model_type = "ERNIE 4.5", "ernie4_5_moe"
    on_gpu = True
    gguf = Gguf(("ernie4_5-moe",), NAMES)
    normalised = True
    wide_angles = True
    wide = ("e_score_correction_bias", "mlp.gate.weight")

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        rule = RouterRule(config.num_experts_per_tok, normalise=True, epsilon=1e-20, wide=True)
        experts, shared = config.moe_num_experts, config.moe_num_shared_experts
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, rope=rope_complex),
            w.norm("post_attention_layernorm"),
            moe_or_dense(w.at("mlp"), config, rule, experts, shared=shared, correction=_CORRECTION),
        )

    def config(self, file: GgufFile) -> Config:
        return {
            **grouped_fields(file),
            "moe_num_experts": file.experts,
            "moe_num_shared_experts": file.count("expert_shared_count", 0),
            "moe_intermediate_size": file.expert_columns,
            "intermediate_size": file.dense_columns,
            "moe_layer_start_index": file.leading_dense,
            "moe_layer_end_index": file.layers - 1,
            "moe_layer_interval": 1,
        }
