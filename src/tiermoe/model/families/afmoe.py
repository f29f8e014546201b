"""AFMoE (Trinity): grouped attention with gated heads, windows in most layers and no positions in the others, norms
before and after each part, a sigmoid router, shared experts, scaled embeddings."""

from __future__ import annotations

from typing import Any

import torch

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.families.family import Family
from tiermoe.model.families.fields import (
    AGAIN,
    SIGMOID,
    Config,
    dense_columns,
    expert_columns,
    expert_count,
    grouped_fields,
    leading_dense,
)
from tiermoe.model.families.names import LATE_NORM, Gguf, block_names
from tiermoe.model.layer import Layer
from tiermoe.model.moe import DenseBlock, MoeBlock, moe_or_dense
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import NormKind, Scope

NAMES = block_names(
    router="router.gate",
    correction="expert_bias",
    shared="shared_experts",
    norms=("input_layernorm", "pre_mlp_layernorm"),
) | {**LATE_NORM, "post_ffw_norm": "post_mlp_layernorm", "attn_gate": "self_attn.gate_proj"}
"""Tensors of a block → modules of a layer."""


class Afmoe(Family):
    name, model_type = "AFMoE (Trinity)", "afmoe"
    gguf = Gguf(("afmoe",), NAMES)
    normalised = True
    has_unrotated = True
    norms = NormKind(late=True, by_kernel=False)

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        full = config.layer_types[index] == "full_attention"
        attention = grouped(
            w.at("self_attn"),
            config,
            index,
            window=window_at(config, index),
            rotary=self.unrotated(config) if full else None,
            norms=("q_norm", "k_norm"),
            gate="gate_proj",
        )
        return Layer(
            w.norm("input_layernorm"),
            attention,
            w.norm("pre_mlp_layernorm"),
            self.part(w, config),
            norm_attended=w.norm("post_attention_layernorm"),
        )

    def part(self, w: Scope, config: Any) -> MoeBlock | DenseBlock:
        """The feed-forward part of a layer: dense in the layers that have no router."""
        rule = RouterRule(
            config.num_experts_per_tok,
            scores="sigmoid",
            normalise=True,
            epsilon=1e-20,
            rounded=False,
            scale=float(config.route_scale),
        )
        return moe_or_dense(
            w.at("mlp"),
            rule,
            config.hidden_act,
            experts=config.num_experts,
            inner=config.moe_intermediate_size,
            dense_inner=config.intermediate_size,
            shared_inner=(config.num_shared_experts or 0) * config.moe_intermediate_size,
            router="router.gate",
            correction="expert_bias",
            norm=w.norm("post_mlp_layernorm"),
        )

    def embedding_scale(self, config: Any, dtype: torch.dtype) -> float:
        """muP's."""
        return float(config.hidden_size**0.5) if config.mup_enabled else 1.0

    def config(self, file: GgufFile) -> Config:
        sigmoid = file.count("expert_gating_func", SIGMOID) == SIGMOID
        if not sigmoid or not file.of_model("expert_weights_norm", True):
            raise ModelError(
                f"{file.path} has no sigmoid router whose weights sum to 1, which every AFMoE has; {AGAIN}"
            )
        return {
            **grouped_fields(file),
            "model_type": "afmoe",
            "num_experts": expert_count(file),
            "num_shared_experts": file.count("expert_shared_count"),
            "moe_intermediate_size": expert_columns(file),
            "intermediate_size": dense_columns(file),
            "num_dense_layers": leading_dense(file),
            "route_scale": file.decimal("expert_weights_scale", 1.0),
            "sliding_window": file.count("attention.sliding_window"),
            "global_attn_every_n_layers": 4,  # models/afmoe.cpp, as the next
            "mup_enabled": True,
        }

