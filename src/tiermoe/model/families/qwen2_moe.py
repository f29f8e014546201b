"""Qwen2-MoE (Qwen1.5-MoE): grouped attention with biases, a softmax router, and a shared expert with a gate."""

from __future__ import annotations

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.families.family import Family
from tiermoe.model.families.gguf import Config, Gguf, block_names, grouped_fields
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import DenseBlock, MoeBlock, dense, moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope

QWEN_NAMES = block_names(shared="shared_expert") | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
"""Tensors of a block → modules of a layer, of Qwen's models with a shared expert."""


class Qwen2Moe(Family):
    name, model_type = "Qwen2-MoE (Qwen1.5-MoE)", "qwen2_moe"
    gguf = Gguf(("qwen2moe",), QWEN_NAMES)
    plain_router = on_gpu = True

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, window=window_at(config, index)),
            w.norm("post_attention_layernorm"),
            part_with_gated_expert(w.at("mlp"), config, normalise=bool(config.norm_topk_prob)),
        )

    def config(self, file: GgufFile) -> Config:
        return {
            **grouped_fields(file),
            "num_experts": file.experts,
            "moe_intermediate_size": file.expert_columns,
            "shared_expert_intermediate_size": file.shape_beside_experts("ffn_gate_shexp.weight")[0],
            "intermediate_size": file.dense_columns,
            "mlp_only_layers": file.dense_layers,
            "norm_topk_prob": False,  # models/qwen2moe.cpp
            "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        }


def part_with_gated_expert(w: Scope, config: ModelConfig, normalise: bool) -> MoeBlock | DenseBlock:
    """The feed-forward part of Qwen's models with a shared expert (2-MoE, 3-Next, 3.5, 3.8). normalise: a token's
    weights sum to 1."""
    if not w.has("gate.weight"):
        return dense(w, config.intermediate_size, config.hidden_act)
    shared = dense(w.at("shared_expert"), config.shared_expert_intermediate_size, config.hidden_act)
    rule = RouterRule(config.num_experts_per_tok, normalise=normalise)
    return moe(
        w, rule, config.num_experts, config.moe_intermediate_size, shared=shared, shared_gate="shared_expert_gate"
    )
