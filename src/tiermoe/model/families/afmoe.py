"""AFMoE (Trinity): grouped attention with gated heads, windows in most layers and no positions in the others, norms
before and after each part, a sigmoid router, shared experts, scaled embeddings."""

from __future__ import annotations

import torch

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.families.family import Family
from tiermoe.model.families.gguf import LATE_NORM, SIGMOID, Config, Gguf, block_names, grouped_fields
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import moe_or_dense
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
    on_gpu = True
    gguf = Gguf(("afmoe",), NAMES)
    normalised = True
    has_unrotated = True
    norms = NormKind(late=True, by_kernel=False)

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
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
        rule = RouterRule(
            config.num_experts_per_tok,
            scores="sigmoid",
            normalise=True,
            epsilon=1e-20,
            rounded=False,
            scale=float(config.route_scale),
        )
        part = moe_or_dense(
            w.at("mlp"),
            config,
            rule,
            config.num_experts,
            shared=config.num_shared_experts,
            router="router.gate",
            correction="expert_bias",
            norm=w.norm("post_mlp_layernorm"),
        )
        return Layer(
            w.norm("input_layernorm"),
            attention,
            w.norm("pre_mlp_layernorm"),
            part,
            norm_attended=w.norm("post_attention_layernorm"),
        )

    def embedding_scale(self, config: ModelConfig, dtype: torch.dtype) -> float:
        """muP's."""
        return float(config.hidden_size**0.5) if config.mup_enabled else 1.0

    def config(self, file: GgufFile) -> Config:
        sigmoid = file.count("expert_gating_func", SIGMOID) == SIGMOID
        if not sigmoid or not file.of_model("expert_weights_norm", True):
            raise file.refusal("has no sigmoid router whose weights sum to 1, which every AFMoE has")
        return {
            **grouped_fields(file),
            "num_experts": file.experts,
            "num_shared_experts": file.count("expert_shared_count"),
            "moe_intermediate_size": file.expert_columns,
            "intermediate_size": file.dense_columns,
            "num_dense_layers": file.leading_dense,
            "route_scale": file.decimal("expert_weights_scale", 1.0),
            "sliding_window": file.count("attention.sliding_window"),
            "global_attn_every_n_layers": 4,  # models/afmoe.cpp, as the next
            "mup_enabled": True,
        }
