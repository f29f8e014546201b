"""Ling 3.0: Kimi Delta Attention, latent attention with gated heads in every few layers, DeepSeek-V3's feed-forward
part."""

from __future__ import annotations

import math
from typing import Any

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile, rounded
from tiermoe.model.attention.base import Attention
from tiermoe.model.attention.latent import latent
from tiermoe.model.attention.linear import is_linear, kimi_delta
from tiermoe.model.families.deepseek_v3 import V3_NAMES, rope_of
from tiermoe.model.families.family import LatentFamily
from tiermoe.model.families.fields import AGAIN, SIGMOID, Config, latent_fields, linear_layers
from tiermoe.model.families.kimi_linear import kimi_part
from tiermoe.model.families.names import Gguf
from tiermoe.model.families.rows import positive_rates
from tiermoe.model.layer import Layer
from tiermoe.model.weights import Scope

NAMES = {
    "attn_gate": "self_attn.g_proj",
    "ssm_f_a": "self_attn.forget_gate.f_proj",
    "ssm_dt": "self_attn.forget_gate.dt_bias",
    "ssm_g_a": "self_attn.g_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
}
"""Tensors of a block → modules or parameters of a layer, beside the usual ones."""


class Ling(LatentFamily):
    name, model_type = "Ling 3.0", "bailing_hybrid"
    gguf = Gguf(("bailingmoe3",), V3_NAMES | NAMES, within="self_attn")
    gguf_parts = staticmethod(positive_rates)
    latent_kv = False
    wide = ("e_score_correction_bias", "conv1d.weight", "A_log", "dt_bias")

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
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
            raise ModelError(
                f"{file.path} is of a model that reads pictures and has positions in several directions, which "
                f"transformers' Ling 3.0 has not; choose a file of a model that reads text alone"
            )
        config, linear = latent_fields(file), linear_layers(file)
        if config.pop("q_lora_rank"):
            raise ModelError(
                f"{file.path} leads to queries by two matrices (attention.q_lora_rank), and transformers' Ling 3.0 by "
                f"one; choose a file of another model"
            )
        if file.count("expert_gating_func") != SIGMOID or file.of_model("kda.safe_gate", True) is not True:
            raise ModelError(
                f"{file.path} has no sigmoid router (expert_gating_func), or no bound of its decays (kda.safe_gate), "
                f"and every Ling 3.0 has both; {AGAIN}"
            )
        return {
            **config,
            "model_type": "bailing_hybrid",
            "num_local_experts": config.pop("n_routed_experts"),
            "layer_types": ["linear_attention" if each else "full_attention" for each in linear],
            "head_dim": file.count("kda.head_dim", least=1),
            "short_conv_kernel_size": file.count("ssm.conv_kernel", least=1),
            "kda_lower_bound": least_decay(file),
        }


def least_decay(file: GgufFile) -> float:
    """The logarithm of the least decay of Kimi's linear attention. ModelError where it is missing or not negative."""
    bound = file.of_model("kda.gate_lower_bound")
    if not isinstance(bound, float) or not -math.inf < bound < 0:
        raise ModelError(f"{file.path} says that kda.gate_lower_bound is {bound}, not a number below 0; {AGAIN}")
    return rounded(bound)
