"""Kimi Linear: Kimi Delta Attention, latent attention without positions in every few layers, DeepSeek-V3's feed-forward
part (arXiv:2510.26692)."""

from __future__ import annotations

from typing import Any

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.latent import latent
from tiermoe.model.attention.linear import is_linear, kimi_delta
from tiermoe.model.families.deepseek_v3 import CORRECTION, V3_NAMES, v3_router
from tiermoe.model.families.family import LatentFamily
from tiermoe.model.families.fields import AGAIN, Config, latent_fields, linear_layers, shape_of
from tiermoe.model.families.names import Gguf
from tiermoe.model.layer import Layer
from tiermoe.model.moe import DenseBlock, MoeBlock, moe_or_dense
from tiermoe.model.rotary import rope_halves
from tiermoe.model.weights import Scope

KIMI_NAMES = {
    "ssm_f_a": "self_attn.forget_gate.f_a_proj",
    "ssm_f_b": "self_attn.forget_gate.f_b_proj",
    "ssm_dt": "self_attn.forget_gate.dt_bias",
    "ssm_a": "self_attn.forget_gate.A_log",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
}
"""Of Kimi's linear attention: tensors of a block → modules or parameters of a layer."""


class KimiLinear(LatentFamily):
    name, model_type = "Kimi Linear", "kimi_linear"
    gguf = Gguf(("kimi-linear",), V3_NAMES | KIMI_NAMES)
    latent_kv = False

    wide = ()

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        own = w.at("self_attn")
        linear = is_linear(config, index)
        return Layer(
            w.norm("input_layernorm"),
            kimi_delta(own, config) if linear else latent(own, config, rope=rope_halves),
            w.norm("post_attention_layernorm"),
            kimi_part(w.at("mlp"), config),
        )

    def config(self, file: GgufFile) -> Config:
        config = latent_fields(file)
        del config["rope_parameters"]  # no layer has positions
        linear = linear_layers(file)
        if True not in linear:
            raise ModelError(f"{file.path} has no layer of linear attention, which every Kimi Linear has; {AGAIN}")
        first, dense = linear.index(True), config.pop("first_k_dense_replace")
        return {
            **config,
            "model_type": "kimi_linear",
            "num_local_experts": config.pop("n_routed_experts"),
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * (len(linear) - dense),
            "norm_topk_prob": True,  # models/kimi-linear.cpp
            "layer_types": ["linear_attention" if each else "full_attention" for each in linear],
            "linear_head_dim": file.count("kda.head_dim"),
            "linear_num_heads": shape_of(file, f"blk.{first}.ssm_beta.weight", 2)[0],
            "linear_conv_kernel_dim": file.count("ssm.conv_kernel"),
        }



def kimi_part(w: Scope, config: Any) -> MoeBlock | DenseBlock:
    """DeepSeek-V3's feed-forward part by the names of Kimi Linear's config."""
    return moe_or_dense(
        w,
        v3_router(config),
        config.hidden_act,
        experts=config.num_experts,
        inner=config.moe_intermediate_size,
        dense_inner=config.intermediate_size,
        shared_inner=(config.num_shared_experts or 0) * config.moe_intermediate_size,
        correction=CORRECTION,
    )
