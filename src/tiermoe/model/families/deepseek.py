"""DeepSeekMoE: grouped attention, a softmax router, shared experts; the first layers are dense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.families.family import Family
from tiermoe.model.families.fields import (
    Config,
    dense_columns,
    expert_columns,
    expert_count,
    grouped_fields,
    leading_dense,
)
from tiermoe.model.families.names import Gguf, block_names
from tiermoe.model.layer import Layer
from tiermoe.model.moe import DenseBlock, MoeBlock, moe_or_dense
from tiermoe.model.parts import Norm
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope


class DeepSeekMoe(Family):
    name, model_type = "DeepSeekMoE", "deepseek"
    gguf = Gguf(("deepseek",), block_names(shared="shared_experts"), turned=True)
    plain_router = True

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        rule = RouterRule(config.num_experts_per_tok, normalise=bool(config.norm_topk_prob))
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index),
            w.norm("post_attention_layernorm"),
            part_with_shared_experts(w.at("mlp"), config, rule),
        )

    def config(self, file: GgufFile) -> Config:
        if (scale := file.decimal("expert_weights_scale", 1.0)) != 1.0:
            raise ModelError(f"{file.path} scales its experts' weights by {scale:g}, which no DeepSeekMoE does")
        return {
            **grouped_fields(file),
            "model_type": "deepseek",
            "n_routed_experts": expert_count(file),
            "n_shared_experts": file.count("expert_shared_count"),
            "moe_intermediate_size": expert_columns(file),
            "intermediate_size": dense_columns(file),
            "first_k_dense_replace": leading_dense(file),
            "norm_topk_prob": False,  # models/deepseek.cpp
        }



def part_with_shared_experts(
    w: Scope,
    config: Any,
    rule: RouterRule,
    correction: str | None = None,
    activation: Callable[..., Tensor] | None = None,
    norm: Norm | None = None,
) -> MoeBlock | DenseBlock:
    """The feed-forward part of DeepSeek's models and of those that follow them: shared experts beside the routed ones,
    as wide as so many of them, and dense in layers without a router. correction, norm: as of `moe`. activation: None:
    the config's."""
    return moe_or_dense(
        w,
        rule,
        config.hidden_act if activation is None else activation,
        experts=config.n_routed_experts,
        inner=config.moe_intermediate_size,
        dense_inner=config.intermediate_size,
        shared_inner=(config.n_shared_experts or 0) * config.moe_intermediate_size,
        correction=correction,
        norm=norm,
    )
