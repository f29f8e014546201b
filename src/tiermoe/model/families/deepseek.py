"""DeepSeekMoE: grouped attention, a softmax router, shared experts; the first layers are dense. DeepSeek-V2: latent
attention, and a router that may choose within groups."""

from __future__ import annotations

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.attention.latent import latent
from tiermoe.model.families.family import Family, LatentFamily
from tiermoe.model.families.gguf import Config, Gguf, block_names, expert_sizes, grouped_fields
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import moe_or_dense
from tiermoe.model.rotary import rope_complex
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope


class DeepSeekMoe(Family):
    name, model_type = "DeepSeekMoE", "deepseek"
    gguf = Gguf(("deepseek",), block_names(shared="shared_experts"), turned=True)
    plain_router = on_gpu = True

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        rule = RouterRule(config.num_experts_per_tok, normalise=bool(config.norm_topk_prob))
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index),
            w.norm("post_attention_layernorm"),
            moe_or_dense(w.at("mlp"), config, rule, config.n_routed_experts, shared=config.n_shared_experts),
        )

    def config(self, file: GgufFile) -> Config:
        if (scale := file.decimal("expert_weights_scale", 1.0)) != 1.0:
            raise ModelError(f"{file.path} scales its experts' weights by {scale:g}, which no DeepSeekMoE does")
        return {
            **grouped_fields(file),
            **expert_sizes(file),
            "norm_topk_prob": False,  # models/deepseek.cpp
        }


class DeepSeekV2(LatentFamily):
    """`DeepSeekV3` reads its GGUF files."""

    name, model_type = "DeepSeek-V2", "deepseek_v2"
    normalised = False
    wide_angles = on_gpu = True

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        in_groups = config.topk_method == "group_limited_greedy"
        rule = RouterRule(
            config.num_experts_per_tok,
            wide=True,
            rounded=False,
            groups=config.n_group if in_groups else 1,
            kept_groups=config.topk_group if in_groups else 1,
            best_of_group=True,
            scale=float(config.routed_scaling_factor),
        )
        return Layer(
            w.norm("input_layernorm"),
            latent(w.at("self_attn"), config, rope=rope_complex),
            w.norm("post_attention_layernorm"),
            moe_or_dense(w.at("mlp"), config, rule, config.n_routed_experts, shared=config.n_shared_experts),
        )
