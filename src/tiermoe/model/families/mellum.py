"""Mellum 2: Qwen3-MoE's layers, some of which have a sliding window."""

from __future__ import annotations

from typing import Any

from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.families.family import HeadFormat
from tiermoe.model.families.qwen3_moe import Qwen3Moe
from tiermoe.model.families.qwen3_next import MTP_NAMES
from tiermoe.model.layer import Layer
from tiermoe.model.weights import Scope


class Mellum(Qwen3Moe):
    name, model_type = "Mellum 2", "mellum"
    mtp_head = HeadFormat(MTP_NAMES, {"layer_types": "sliding_attention", "mlp_layer_types": "sparse"})

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        norms = ("q_norm", "k_norm")
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, window=window_at(config, index), norms=norms),
            w.norm("post_attention_layernorm"),
            self.part(w.at("mlp"), config),
        )
