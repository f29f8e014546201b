"""LFM2-MoE: short convolutions, grouped attention in some layers, a sigmoid router with a correction; the first layers
are dense."""

from __future__ import annotations

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.base import Attention
from tiermoe.model.attention.convolution import short_convolution
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.families.family import Family
from tiermoe.model.families.gguf import Config, Gguf, block_names, common_fields
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import DenseBlock, MoeBlock, dense, moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import NormKind, Scope

NAMES = block_names(
    "feed_forward",
    correction="expert_bias",
    output="out_proj",
    norms=("operator_norm", "ffn_norm"),
    head_norms=("q_layernorm", "k_layernorm"),
    dense=("w1", "w3", "w2"),
) | {f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")}
"""Tensors of a block → modules of a layer."""
OUTSIDE_NAMES = {
    "token_embd": "embed_tokens", "output_norm": "embedding_norm", "token_embd_norm": "embedding_norm"
}  # fmt: skip


class Lfm2Moe(Family):
    name, model_type = "LFM2-MoE", "lfm2_moe"
    gguf = Gguf(("lfm2moe",), NAMES, "feed_forward.experts", outside=OUTSIDE_NAMES)
    final_norm = "model.embedding_norm"
    norms = NormKind(epsilon="norm_eps")

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        attention: Attention
        if config.layer_types[index] == "conv":
            attention = short_convolution(w.at("conv"), config)
        else:
            norms = ("q_layernorm", "k_layernorm")
            attention = grouped(w.at("self_attn"), config, index, norms=norms, output="out_proj")
        return Layer(w.norm("operator_norm"), attention, w.norm("ffn_norm"), self.part(w.at("feed_forward"), config))

    def part(self, w: Scope, config: ModelConfig) -> MoeBlock | DenseBlock:
        """The feed-forward part: dense in the layers that have no router."""
        if not w.has("gate.weight"):
            return dense(w, config.intermediate_size, "silu", first=("w1", "w3"), down="w2")
        rule = RouterRule(
            config.num_experts_per_tok,
            scores="sigmoid",
            normalise=bool(config.norm_topk_prob),
            epsilon=1e-6,
            scale=float(config.routed_scaling_factor),
        )
        return moe(w, rule, config.num_experts, config.moe_intermediate_size, correction="expert_bias")

    def activation(self, config: ModelConfig) -> str:
        return "silu"  # transformers' code has it, and no config

    def config(self, file: GgufFile) -> Config:
        config, dense = common_fields(file), file.leading_dense
        convolves = file.layers_with("shortconv.conv.weight")
        return {
            **config,
            "num_key_value_heads": file.largest("attention.head_count_kv"),  # convolutions have none
            "norm_eps": config["rms_norm_eps"],
            "layer_types": ["conv" if each else "full_attention" for each in convolves],
            "conv_L_cache": file.count("shortconv.l_cache"),
            "num_dense_layers": dense,
            "num_experts": file.experts,
            "moe_intermediate_size": file.expert_columns,
            "intermediate_size": file.dense_columns,
            "use_expert_bias": f"blk.{dense}.exp_probs_b.bias" in file.tensors,
            "norm_topk_prob": True,  # models/lfm2moe.cpp
        }
