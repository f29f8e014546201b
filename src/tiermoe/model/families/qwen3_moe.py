"""Qwen3-MoE: grouped attention with normed heads, a softmax router. Mellum 2 has the same layers, some with a sliding
window."""

from __future__ import annotations

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.families.family import Family, HeadFormat
from tiermoe.model.families.gguf import Config, Gguf, block_names, grouped_fields, window_layers
from tiermoe.model.families.qwen3_next import MTP_NAMES
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import moe_or_dense
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope


class Qwen3Moe(Family):
    name, model_type = "Qwen3-MoE", "qwen3_moe"
    gguf = Gguf(("qwen3moe",), block_names())
    plain_router = on_gpu = True

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        rule = RouterRule(config.num_experts_per_tok, normalise=bool(config.norm_topk_prob))
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, window=config.sliding_window, norms=("q_norm", "k_norm")),
            w.norm("post_attention_layernorm"),
            moe_or_dense(w.at("mlp"), config, rule, config.num_experts),
        )

    def config(self, file: GgufFile) -> Config:
        return {
            **grouped_fields(file),
            "num_experts": file.experts,
            "moe_intermediate_size": file.expert_columns,
            "intermediate_size": file.dense_columns,
            "mlp_only_layers": file.dense_layers,
            "norm_topk_prob": True,  # models/qwen3moe.cpp
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        }


class Mellum(Family):
    name, model_type = "Mellum 2", "mellum"
    on_gpu = True
    gguf = Gguf(("mellum",), block_names())
    mtp_head = HeadFormat(MTP_NAMES, {"layer_types": "sliding_attention", "mlp_layer_types": "sparse"})

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        rule = RouterRule(config.num_experts_per_tok, normalise=bool(config.norm_topk_prob))
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, window=window_at(config, index), norms=("q_norm", "k_norm")),
            w.norm("post_attention_layernorm"),
            moe_or_dense(w.at("mlp"), config, rule, config.num_experts),
        )

    def config(self, file: GgufFile) -> Config:
        """No layer has a window if the file has no size of one. ModelError for layers without experts, and for
        weights that are scaled."""
        file.refuse_dense_layers("Mellum 2")
        if (scale := file.decimal("expert_weights_scale", 1.0)) != 1.0:
            raise file.refusal(f"scales its experts' weights by {scale:g}, which no Mellum 2 does")
        config, window = grouped_fields(file), file.count("attention.sliding_window", 0)
        rope = config["rope_parameters"]
        return {
            **config,
            "num_experts": file.experts,
            "moe_intermediate_size": file.expert_columns,
            "norm_topk_prob": True,  # models/mellum.cpp, as that a window's layers do not scale their rotary embedding
            "sliding_window": window or None,
            "layer_types": window_layers(file) if window else ["full_attention"] * file.layers,
            "rope_parameters": {
                "full_attention": rope,
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": file.decimal("rope.freq_base_swa", rope["rope_theta"]),
                },
            },
        }
