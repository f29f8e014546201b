"""Mixtral: grouped attention, a softmax router whose weights sum to 1. Mistral 4: latent attention whose queries have a
temperature, a softmax router that chooses within groups, shared experts."""

from __future__ import annotations

import torch

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.attention.latent import latent
from tiermoe.model.families.deepseek_v3 import rope_of
from tiermoe.model.families.family import Family, LatentFamily
from tiermoe.model.families.gguf import LATENT, Config, Gguf, block_names, grouped_fields, latent_fields
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import moe, moe_or_dense
from tiermoe.model.rotary import Temperature
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope


class Mixtral(Family):
    name, model_type = "Mixtral", "mixtral"
    gguf = Gguf(("llama",), block_names(), turned=True)
    normalised = plain_router = on_gpu = True

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
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
            "num_local_experts": file.experts,
            "intermediate_size": file.expert_columns,
            "sliding_window": None,
        }


class Mistral4(LatentFamily):
    name, model_type = "Mistral 4", "mistral4"
    on_gpu = True
    gguf = Gguf(("mistral4",), block_names(shared="shared_experts") | LATENT)

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        rule = RouterRule(
            config.num_experts_per_tok,
            normalise=bool(config.norm_topk_prob),
            epsilon=1e-20,
            groups=config.n_group,
            kept_groups=config.topk_group,
            scale=float(config.routed_scaling_factor),
        )
        return Layer(
            w.norm("input_layernorm"),
            latent(w.at("self_attn"), config, rope=rope_of(config)),
            w.norm("post_attention_layernorm"),
            moe_or_dense(w.at("mlp"), config, rule, config.n_routed_experts, shared=config.n_shared_experts),
        )

    def temperature(self, config: ModelConfig) -> Temperature | None:
        """It grows with the logarithm of how often a position has the length that the model was first trained for."""
        beta = config.rope_parameters.get("llama_4_scaling_beta")
        length = config.rope_parameters.get("original_max_position_embeddings")
        return None if beta is None else lambda positions: 1 + beta * torch.log(1 + torch.floor(positions / length))

    def config(self, file: GgufFile) -> Config:
        config = latent_fields(file)
        rope = config["rope_parameters"]
        if rope["rope_type"] != "yarn":
            raise ModelError(f"{file.path} does not scale its rotary embedding by yarn, which every Mistral 4 does")
        rope["llama_4_scaling_beta"] = file.decimal("attention.temperature_scale")
        return config
