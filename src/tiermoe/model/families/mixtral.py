"""Mixtral: grouped attention, a softmax router whose weights sum to 1."""

from __future__ import annotations

from typing import Any

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.families.family import Family
from tiermoe.model.families.fields import Config, expert_columns, expert_count, grouped_fields
from tiermoe.model.families.names import Gguf, block_names
from tiermoe.model.layer import Layer
from tiermoe.model.moe import moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope


class Mixtral(Family):
    name, model_type = "Mixtral", "mixtral"
    gguf = Gguf(("llama",), block_names(), turned=True)
    normalised = plain_router = True

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        rule = RouterRule(config.num_experts_per_tok, normalise=True, rounded=False)
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, window=config.sliding_window),
            w.norm("post_attention_layernorm"),
            moe(w.at("mlp"), rule, config.num_local_experts, config.intermediate_size),
        )

    def config(self, file: GgufFile) -> Config:
        return {
            **grouped_fields(file),
            "model_type": "mixtral",
            "num_local_experts": expert_count(file),
            "intermediate_size": expert_columns(file),
            "sliding_window": None,
        }
