"""EXAONE MoE (K-EXAONE): grouped attention, some layers of which have a window and the others no positions, and
DeepSeek-V3's router with shared experts."""

from __future__ import annotations

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.families.deepseek_v3 import CORRECTION, SHARED_NAMES, v3_router
from tiermoe.model.families.family import Family, HeadFormat
from tiermoe.model.families.gguf import Config, Gguf, grouped_fields, window_layers
from tiermoe.model.families.qwen3_next import MTP_NAMES
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import moe_or_dense
from tiermoe.model.weights import Scope


class ExaoneMoe(Family):
    name, model_type = "EXAONE MoE (K-EXAONE)", "exaone_moe"
    on_gpu = True
    gguf = Gguf(("exaone-moe",), SHARED_NAMES)
    has_unrotated = True
    # vLLM's `exaone_moe` says that the head's layer is dense and has a window
    mtp_head = HeadFormat(MTP_NAMES, {"layer_types": "sliding_attention", "mlp_layer_types": "dense"})

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        unrotated = config.sliding_window is not None and config.layer_types[index] == "full_attention"
        attention = grouped(
            w.at("self_attn"),
            config,
            index,
            window=window_at(config, index),
            rotary=self.unrotated(config) if unrotated else None,
            norms=("q_norm", "k_norm"),
        )
        rule, experts, shared = v3_router(config), config.num_experts, config.num_shared_experts
        return Layer(
            w.norm("input_layernorm"),
            attention,
            w.norm("post_attention_layernorm"),
            moe_or_dense(w.at("mlp"), config, rule, experts, shared=shared, correction=CORRECTION),
        )

    def config(self, file: GgufFile) -> Config:
        return {
            **grouped_fields(file),
            "num_experts": file.experts,
            "num_shared_experts": file.count("expert_shared_count"),
            "moe_intermediate_size": file.expert_columns,
            "intermediate_size": file.dense_columns,
            "first_k_dense_replace": file.leading_dense,
            "routed_scaling_factor": file.decimal("expert_weights_scale", 1.0),
            "norm_topk_prob": bool(file.of_model("expert_weights_norm", False)),
            "sliding_window": file.count("attention.sliding_window"),
            "layer_types": window_layers(file),
        }
