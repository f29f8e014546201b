"""Granite models, Nemotron-H, Jamba, and layers of Mamba, as llama.cpp's converter writes them: `GraniteMoeModel`,
`Mamba2Model`, `GraniteHybridModel`, `NemotronHModel` and `JambaModel`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
from torch import Tensor

NAMES = {
    "A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias", "norm.weight": "ssm_norm.weight",
    "conv1d.weight": "ssm_conv1d.weight", "conv1d.bias": "ssm_conv1d.bias", "in_proj.weight": "ssm_in.weight",
    "out_proj.weight": "ssm_out.weight", "x_proj.weight": "ssm_x.weight", "dt_proj.weight": "ssm_dt.weight",
    "dt_proj.bias": "ssm_dt.bias", "dt_layernorm.weight": "ssm_dt_norm.weight",
    "b_layernorm.weight": "ssm_b_norm.weight", "c_layernorm.weight": "ssm_c_norm.weight",
}  # fmt: skip


def mamba_tensors(layer: str, name: str, value: Tensor, groups: int | None) -> Iterator[tuple[str, Any, Any]]:
    """(name in the file, views of the parameter, shape in the file). groups: of Mamba-2; None: it is Mamba-1."""
    shape = tuple(value.squeeze(1).shape) if name == "conv1d.weight" else tuple(value.shape)
    if groups is not None and name in ("A_log", "D"):
        shape = (len(value), 1)
    if groups is not None and name == "norm.weight":
        shape = (groups, len(value) // groups)
    yield f"{layer}.{NAMES[name]}", (value,), shape


def mamba_metadata(writer: gguf.GGUFWriter, sizes: tuple[int, int, int, int, int]) -> None:
    """sizes: heads, columns of a head, groups, columns of a state, taps."""
    heads, columns, groups, state, taps = sizes
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(heads * columns)
    writer.add_ssm_time_step_rank(heads)


def granite_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Of both kinds of models."""
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if "mamba_n_heads" not in config:
        return
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    names = ("n_heads", "d_head", "n_groups", "d_state", "d_conv")
    heads, columns, groups, state, taps = (config[f"mamba_{name}"] for name in names)
    mamba_metadata(writer, (heads, columns, groups, state, taps))


def nemotron_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`NemotronHModel.set_gguf_parameters`."""
    names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    heads, columns, groups, state, taps = (config[name] for name in names)
    mamba_metadata(writer, (heads, columns, groups, state, taps))
    writer.add_rope_scaling_finetuned(False)
    writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    if config["moe_latent_size"] is not None:
        writer.add_moe_latent_size(config["moe_latent_size"])


def jamba_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`JambaModel.set_gguf_parameters`."""
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_dt_rank"])
