"""EXAONE MoE (K-EXAONE): grouped attention, some layers of which have a window and the others no positions, and
DeepSeek-V3's router with shared experts."""

from __future__ import annotations

from typing import Any

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.families.deepseek_v3 import CORRECTION, SHARED_NAMES, v3_router
from tiermoe.model.families.family import Family, HeadFormat
from tiermoe.model.families.fields import (
    Config,
    dense_columns,
    expert_columns,
    expert_count,
    grouped_fields,
    leading_dense,
    window_layers,
)
from tiermoe.model.families.names import Gguf
from tiermoe.model.families.qwen3_next import MTP_NAMES
from tiermoe.model.layer import Layer
from tiermoe.model.moe import DenseBlock, MoeBlock, moe_or_dense
from tiermoe.model.weights import Scope


class ExaoneMoe(Family):
    name, model_type = "EXAONE MoE (K-EXAONE)", "exaone_moe"
    gguf = Gguf(("exaone-moe",), SHARED_NAMES)
    has_unrotated = True
    # vLLM's `exaone_moe` says that the head's layer is dense and has a window
    mtp_head = HeadFormat(MTP_NAMES, {"layer_types": "sliding_attention", "mlp_layer_types": "dense"})

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        window = window_at(config, index)
        unrotated = config.sliding_window is not None and config.layer_types[index] == "full_attention"
        attention = grouped(
            w.at("self_attn"),
            config,
            index,
            window=window,
            rotary=self.unrotated(config) if unrotated else None,
            norms=("q_norm", "k_norm"),
        )
        return Layer(
            w.norm("input_layernorm"), attention, w.norm("post_attention_layernorm"), self.part(w.at("mlp"), config)
        )

    def part(self, w: Scope, config: Any) -> MoeBlock | DenseBlock:
        """The feed-forward part: dense in the layers that have no router."""
        return moe_or_dense(
            w,
            v3_router(config),
            config.hidden_act,
            experts=config.num_experts,
            inner=config.moe_intermediate_size,
            dense_inner=config.intermediate_size,
            shared_inner=(config.num_shared_experts or 0) * config.moe_intermediate_size,
            correction=CORRECTION,
        )

    def config(self, file: GgufFile) -> Config:
        return {
            **grouped_fields(file),
            "model_type": "exaone_moe",
            "num_experts": expert_count(file),
            "num_shared_experts": file.count("expert_shared_count"),
            "moe_intermediate_size": expert_columns(file),
            "intermediate_size": dense_columns(file),
            "first_k_dense_replace": leading_dense(file),
            "routed_scaling_factor": file.decimal("expert_weights_scale", 1.0),
            "norm_topk_prob": bool(file.of_model("expert_weights_norm", False)),
            "sliding_window": file.count("attention.sliding_window"),
            "layer_types": window_layers(file),
        }

