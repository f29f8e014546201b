"""MiMo-V2-Flash: grouped attention with narrow values, most layers of which have a window, sinks and twice as many heads
of keys, and DeepSeek-V3's router."""

from __future__ import annotations

from typing import Any

from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.families.deepseek_v3 import CORRECTION, v3_router
from tiermoe.model.families.family import Family, HeadFormat
from tiermoe.model.layer import Layer
from tiermoe.model.moe import DenseBlock, MoeBlock, dense, moe
from tiermoe.model.weights import Scope

_HEAD = "model.mtp.layers.0."


class MimoV2Flash(Family):
    name, model_type = "MiMo-V2-Flash", "mimo_v2_flash"
    # The first of three heads: the others are made for its output at every position, and it drafts on its own. SGLang's
    # `mimo_v2_flash_nextn` says that its layer is dense and has a window.
    mtp_head = HeadFormat(
        {
            f"{_HEAD}final_layernorm.": "shared_head.norm.",
            f"{_HEAD}pre_mlp_layernorm.": "post_attention_layernorm.",
            _HEAD: "",
        },
        {"layer_types": "sliding_attention", "mlp_layer_types": "dense"},
    )

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        window, full = window_at(config, index), config.layer_types[index] == "full_attention"
        attention = grouped(
            w.at("self_attn"),
            config,
            index,
            kv_heads=config.num_key_value_heads * (1 if full else 2),
            value_columns=config.v_head_dim,
            window=window,
            sinks=bool(window),
            value_scale=float(config.attention_value_scale or 1),
        )
        return Layer(
            w.norm("input_layernorm"), attention, w.norm("post_attention_layernorm"), self.part(w.at("mlp"), config)
        )

    def part(self, w: Scope, config: Any) -> MoeBlock | DenseBlock:
        """The feed-forward part: dense in the layers that have no router."""
        if not w.has("gate.weight"):
            return dense(w, config.intermediate_size, config.hidden_act)
        return moe(
            w, v3_router(config), config.n_routed_experts, config.moe_intermediate_size, correction=CORRECTION
        )
