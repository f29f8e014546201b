"""Ling 3.0 in GGUF files (`BailingMoeV3Model` of the converter): its config, what the tensors of its linear attention
are called, and the rates of its decays."""

from __future__ import annotations

import math

import torch

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_checkpoint import Change, Rows
from tiermoe.formats.gguf_file import GgufFile, GgufTensor, rounded
from tiermoe.model.gguf.config import SIGMOID, Config, latent
from tiermoe.model.gguf.linear_attention import rates
from tiermoe.model.gguf.shapes import AGAIN, linear_layers

NAMES = {
    "attn_gate": "self_attn.g_proj",
    "ssm_f_a": "self_attn.forget_gate.f_proj",
    "ssm_dt": "self_attn.forget_gate.dt_bias",
    "ssm_g_a": "self_attn.g_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
}
"""Tensors of a block → modules or parameters of a layer, beside the usual ones."""


def bailingmoe3(file: GgufFile) -> Config:
    """Without the limits of the last layers' gates (`swiglu_clamp_exp` and `swiglu_clamp_shexp`), which transformers'
    and the published code do not have. ModelError for a model that transformers' Ling 3.0 is not."""
    if file.of_model("rope.dimension_sections") is not None:
        raise ModelError(
            f"{file.path} is of a model that reads pictures and has positions in several directions, which "
            f"transformers' Ling 3.0 has not; choose a file of a model that reads text alone"
        )
    config, linear = latent(file), linear_layers(file)
    if config.pop("q_lora_rank"):
        raise ModelError(
            f"{file.path} leads to queries by two matrices (attention.q_lora_rank), and transformers' Ling 3.0 by one; "
            f"choose a file of another model"
        )
    if file.count("expert_gating_func") != SIGMOID or file.of_model("kda.safe_gate", True) is not True:
        raise ModelError(
            f"{file.path} has no sigmoid router (expert_gating_func), or no bound of its decays (kda.safe_gate), and "
            f"every Ling 3.0 has both; {AGAIN}"
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


def positive_rates(_: GgufFile, stem: str, tensor: GgufTensor) -> dict[str, Rows]:
    """The rates of a layer's decays, by their name in the block, of files that have exp(A_log). None of other
    tensors."""
    return _decay_rates(stem, tensor, torch.log)


def negative_rates(_: GgufFile, stem: str, tensor: GgufTensor) -> dict[str, Rows]:
    """`positive_rates`, of files that have -exp(A_log)."""
    return _decay_rates(stem, tensor, rates)


def _decay_rates(stem: str, tensor: GgufTensor, change: Change) -> dict[str, Rows]:
    found = Rows(tensor, (math.prod(tensor.shape),), change=change)
    return {"forget_gate.A_log": found} if stem == "ssm_a" else {}
