"""Qwen3-Next and Qwen3.5: linear attention by the gated delta rule, grouped attention with gated heads in every few
layers, centred norms, and Qwen2-MoE's feed-forward part."""

from __future__ import annotations

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.base import Attention
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.attention.linear import gated_delta, is_linear
from tiermoe.model.families.family import Family, HeadFormat
from tiermoe.model.families.gguf import LATE_NORM, Config, Gguf, partly_rotated_fields
from tiermoe.model.families.qwen2_moe import QWEN_NAMES, part_with_gated_expert
from tiermoe.model.families.rows import linear_config, linear_rows
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.weights import NormKind, Scope

MTP_NAMES = {
    "mtp.layers.0.": "",
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
}
"""Names of an MTP head beside the model's layers (transformers' `MtpModel`, vLLM's `qwen3_next_mtp`)."""


class Qwen3Next(Family):
    name, model_type = "Qwen3-Next", "qwen3_next"
    plain_router = True
    norms = NormKind(centred=True)
    mtp_head = HeadFormat(MTP_NAMES, {"layer_types": "full_attention"})

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        attention: Attention
        if is_linear(config, index):
            attention = gated_delta(w.at("linear_attn"), config)
        else:
            attention = grouped(w.at("self_attn"), config, index, norms=("q_norm", "k_norm"), gated=True)
        return Layer(
            w.norm("input_layernorm"),
            attention,
            w.norm("post_attention_layernorm"),
            part_with_gated_expert(w.at("mlp"), config, self.renormalises(config)),
        )


class Qwen35Moe(Qwen3Next):
    """Its linear attention has a matrix for each part of the projection."""

    name, model_type = "Qwen3.5-MoE", "qwen3_5_moe_text"
    gguf = Gguf(("qwen35moe", "qwen3next"), QWEN_NAMES | LATE_NORM, centred=True)
    gguf_parts = staticmethod(linear_rows)
    normalised = True

    def config(self, file: GgufFile) -> Config:
        """Qwen3.5, and Qwen3-Next where all layers have experts."""
        file.refuse_dense_layers("Qwen3-Next or Qwen3.5 that was published", "take the model's safetensors")
        return {
            **partly_rotated_fields(file),
            **linear_config(file),
            "num_experts": file.experts,
            "moe_intermediate_size": file.expert_columns,
            "shared_expert_intermediate_size": file.shape_beside_experts("ffn_gate_shexp.weight")[0],
        }
