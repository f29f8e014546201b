"""Mellum 2: Qwen3-MoE's layers, some of which have a sliding window."""

from __future__ import annotations

from typing import Any

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.families.family import HeadFormat
from tiermoe.model.families.fields import (
    AGAIN,
    Config,
    dense_layers,
    expert_columns,
    expert_count,
    grouped_fields,
    layer_count,
    window_layers,
)
from tiermoe.model.families.names import Gguf, block_names
from tiermoe.model.families.qwen3_moe import Qwen3Moe
from tiermoe.model.families.qwen3_next import MTP_NAMES
from tiermoe.model.layer import Layer
from tiermoe.model.weights import Scope


class Mellum(Qwen3Moe):
    name, model_type = "Mellum 2", "mellum"
    gguf = Gguf(("mellum",), block_names())
    mtp_head = HeadFormat(MTP_NAMES, {"layer_types": "sliding_attention", "mlp_layer_types": "sparse"})

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        norms = ("q_norm", "k_norm")
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, window=window_at(config, index), norms=norms),
            w.norm("post_attention_layernorm"),
            self.part(w.at("mlp"), config),
        )

    def config(self, file: GgufFile) -> Config:
        """No layer has a window if the file has no size of one. ModelError for layers without experts, and for
        weights that are scaled."""
        if dense := dense_layers(file):
            raise ModelError(
                f"{file.path} has layers without experts ({', '.join(map(str, dense))}), which no Mellum 2 has; {AGAIN}"
            )
        if (scale := file.decimal("expert_weights_scale", 1.0)) != 1.0:
            raise ModelError(f"{file.path} scales its experts' weights by {scale:g}, which no Mellum 2 does; {AGAIN}")
        config, window = grouped_fields(file), file.count("attention.sliding_window", 0)
        rope = config["rope_parameters"]
        return {
            **config,
            "model_type": "mellum",
            "num_experts": expert_count(file),
            "moe_intermediate_size": expert_columns(file),
            "norm_topk_prob": True,  # models/mellum.cpp, as that a window's layers do not scale their rotary embedding
            "sliding_window": window or None,
            "layer_types": window_layers(file) if window else ["full_attention"] * layer_count(file),
            "rope_parameters": {
                "full_attention": rope,
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": file.decimal("rope.freq_base_swa", rope["rope_theta"]),
                },
            },
        }
