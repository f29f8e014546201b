"""Kimi Linear: Kimi Delta Attention, latent attention without positions in every few layers, DeepSeek-V3's feed-forward
part (arXiv:2510.26692). Ling 3.0: the same with positions, and with gated heads in latent attention."""

from __future__ import annotations

import math

from tiermoe.formats.gguf_file import GgufFile, rounded
from tiermoe.model.attention.base import Attention
from tiermoe.model.attention.latent import latent
from tiermoe.model.attention.linear import is_linear, kimi_delta
from tiermoe.model.families.deepseek_v3 import CORRECTION, V3_NAMES, rope_of, v3_router
from tiermoe.model.families.family import LatentFamily
from tiermoe.model.families.gguf import SIGMOID, Config, Gguf, latent_fields, mlp_layer_types
from tiermoe.model.families.rows import positive_rates
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
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
LING_NAMES = {
    "attn_gate": "self_attn.g_proj",
    "ssm_f_a": "self_attn.forget_gate.f_proj",
    "ssm_dt": "self_attn.forget_gate.dt_bias",
    "ssm_g_a": "self_attn.g_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
}
"""Tensors of a block → modules or parameters of a layer, beside the usual ones."""


class KimiLinear(LatentFamily):
    name, model_type = "Kimi Linear", "kimi_linear"
    gguf = Gguf(("kimi-linear",), V3_NAMES | KIMI_NAMES)
    latent_kv = False
    wide = ()

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        own, linear = w.at("self_attn"), is_linear(config, index)
        return Layer(
            w.norm("input_layernorm"),
            kimi_delta(own, config) if linear else latent(own, config, rope=rope_halves),
            w.norm("post_attention_layernorm"),
            kimi_part(w.at("mlp"), config),
        )

    def config(self, file: GgufFile) -> Config:
        config = latent_fields(file)
        del config["rope_parameters"]  # no layer has positions
        linear = file.linear_layers
        if True not in linear:
            raise file.refusal("has no layer of linear attention, which every Kimi Linear has")
        del config["first_k_dense_replace"]
        return {
            **config,
            "num_local_experts": config.pop("n_routed_experts"),
            "mlp_layer_types": mlp_layer_types(file),
            "norm_topk_prob": True,  # models/kimi-linear.cpp
            "layer_types": ["linear_attention" if each else "full_attention" for each in linear],
            "linear_head_dim": file.count("kda.head_dim"),
            "linear_num_heads": file.shape(f"blk.{linear.index(True)}.ssm_beta.weight")[0],
            "linear_conv_kernel_dim": file.count("ssm.conv_kernel"),
        }


class Ling(LatentFamily):
    name, model_type = "Ling 3.0", "bailing_hybrid"
    gguf = Gguf(("bailingmoe3",), V3_NAMES | LING_NAMES, within="self_attn")
    gguf_parts = staticmethod(positive_rates)
    latent_kv = False
    wide = ("e_score_correction_bias", "conv1d.weight", "A_log", "dt_bias")

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        own, heads = w.at("self_attn"), config.num_attention_heads
        attention: Attention
        if is_linear(config, index):
            attention = kimi_delta(own, config)
        else:
            attention = latent(own, config, rope=rope_of(config), gate="g_proj", gate_columns=heads)
        return Layer(
            w.norm("input_layernorm"),
            attention,
            w.norm("post_attention_layernorm"),
            kimi_part(w.at("mlp"), config),
        )

    def config(self, file: GgufFile) -> Config:
        """Without the limits of the last layers' gates (`swiglu_clamp_exp` and `swiglu_clamp_shexp`), which
        transformers' and the published code do not have. ModelError for a model that transformers' Ling 3.0 is
        not."""
        if file.of_model("rope.dimension_sections") is not None:
            raise file.refusal(
                "is of a model that reads pictures and has positions in several directions, which transformers' Ling "
                "3.0 has not",
                "choose a file of a model that reads text alone",
            )
        config, linear = latent_fields(file), file.linear_layers
        if config.pop("q_lora_rank"):
            raise file.refusal(
                "leads to queries by two matrices (attention.q_lora_rank), and transformers' Ling 3.0 by one",
                "choose a file of another model",
            )
        if file.count("expert_gating_func") != SIGMOID or file.of_model("kda.safe_gate", True) is not True:
            raise file.refusal(
                "has no sigmoid router (expert_gating_func), or no bound of its decays (kda.safe_gate), and every Ling "
                "3.0 has both"
            )
        return {
            **config,
            "num_local_experts": config.pop("n_routed_experts"),
            "layer_types": ["linear_attention" if each else "full_attention" for each in linear],
            "head_dim": file.count("kda.head_dim", least=1),
            "short_conv_kernel_size": file.count("ssm.conv_kernel", least=1),
            "kda_lower_bound": least_decay(file),
        }


def kimi_part(w: Scope, config: ModelConfig) -> MoeBlock | DenseBlock:
    """DeepSeek-V3's feed-forward part by the names of Kimi Linear's config."""
    rule, experts, shared = v3_router(config), config.num_experts, config.num_shared_experts
    return moe_or_dense(w, config, rule, experts, shared=shared, correction=CORRECTION)


def least_decay(file: GgufFile) -> float:
    """The logarithm of the least decay of Kimi's linear attention. ModelError where it is missing or not negative."""
    bound = file.of_model("kda.gate_lower_bound")
    if not isinstance(bound, float) or not -math.inf < bound < 0:
        raise file.refusal(f"says that kda.gate_lower_bound is {bound}, not a number below 0")
    return rounded(bound)
