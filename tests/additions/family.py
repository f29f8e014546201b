"""A model family from outside of the package: Qwen3-MoE with another activation, in one file."""

from __future__ import annotations

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tiermoe.model.attention.grouped import grouped
from tiermoe.model.families.family import Family
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope


class Mine(Family):
    name, model_type = "Mine", "mine_moe"

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        rule = RouterRule(config.num_experts_per_tok, normalise=bool(config.norm_topk_prob))
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, norms=("q_norm", "k_norm")),
            w.norm("post_attention_layernorm"),
            moe(w.at("mlp"), rule, config.num_experts, config.moe_intermediate_size),
        )


class MineConfig(Qwen3MoeConfig):
    model_type = "mine_moe"


class MineForCausalLM(Qwen3MoeForCausalLM):
    config_class = MineConfig
