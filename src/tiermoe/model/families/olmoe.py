"""OLMoE and FlexOlmo: grouped attention whose norms are over all heads together."""

from __future__ import annotations

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.families.family import Family
from tiermoe.model.families.gguf import Config, Gguf, block_names, grouped_fields
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import NormKind, Scope

_NORMS = ("q_norm", "k_norm")


class Olmoe(Family):
    name, model_type = "OLMoE", "olmoe"
    gguf = Gguf(("olmoe",), block_names())
    plain_router = on_gpu = True

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        rule = RouterRule(config.num_experts_per_tok, normalise=bool(config.norm_topk_prob))
        clip = None if config.clip_qkv is None else float(config.clip_qkv)
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, norms=_NORMS, norm_all_heads=True, clip=clip),
            w.norm("post_attention_layernorm"),
            moe(w.at("mlp"), rule, config.num_experts, config.intermediate_size),
        )

    def config(self, file: GgufFile) -> Config:
        return {
            **grouped_fields(file),
            "num_experts": file.experts,
            "intermediate_size": file.expert_columns,
            "clip_qkv": file.decimal("attention.clamp_kqv", None),
            "norm_topk_prob": False,  # models/olmoe.cpp
        }


class FlexOlmo(Family):
    """Norms are after attention and after the feed-forward part, not before them."""

    name, model_type = "FlexOlmo", "flex_olmo"
    plain_router = on_gpu = True
    norms = NormKind(late=True)

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        rule = RouterRule(config.num_experts_per_tok, normalise=bool(config.norm_topk_prob))
        norm = w.norm("post_feedforward_layernorm")
        return Layer(
            None,
            grouped(w.at("self_attn"), config, index, norms=_NORMS, norm_all_heads=True),
            None,
            moe(w.at("mlp"), rule, config.num_experts, config.intermediate_size, norm=norm),
            norm_attended=w.norm("post_attention_layernorm"),
        )
