"""Layers of linear attention as llama.cpp's converter writes them: `Qwen3NextModel`,
`_LinearAttentionVReorderBase` and `KimiLinearModel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gguf
from torch import Tensor

NAMES = {
    "A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "norm.weight": "ssm_norm.weight", "out_proj.weight": "ssm_out.weight",
    "conv1d.weight": "ssm_conv1d.weight", "in_proj_qkv.weight": "attn_qkv.weight", "in_proj_z.weight":
    "attn_gate.weight", "in_proj_b.weight": "ssm_beta.weight", "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
}  # fmt: skip


def linear_tensors(layer: str, name: str, value: Tensor, config: Any, family: str) -> Iterator[tuple[str, Any, Any]]:
    """(name in the file, views of the parameter whose rows follow each other there, shape in the file)."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    key, columns, shared = config.linear_key_head_dim, config.linear_value_head_dim, heads // keys
    if name == "in_proj_qkvz.weight":
        groups = value.view(keys, -1, value.shape[-1])
        parts = groups.split([key, key, shared * columns, shared * columns], dim=1)
        rows = 2 * keys * key + heads * columns
        yield f"{layer}.attn_qkv.weight", parts[:3], (rows, value.shape[-1])
        yield f"{layer}.attn_gate.weight", parts[3:], (heads * columns, value.shape[-1])
        return
    shape = value.squeeze(1).shape if name == "conv1d.weight" else value.shape
    yield f"{layer}.{NAMES[name]}", _tiled(name, value, keys, shared, 2 * keys * key, family), tuple(shape)


def _tiled(name: str, value: Tensor, keys: int, shared: int, mixed: int, family: str) -> tuple[Tensor, ...]:
    """Views with the heads of values in Qwen3.5's order, Qwen3.8's too: the first of each key head, the second of each,
    …"""
    if family not in ("qwen3_5_moe_text", "qwen4_exp_text") or name == "norm.weight":
        return (value,)
    if name == "out_proj.weight":
        return (value.view(len(value), keys, shared, -1).swapaxes(1, 2),)
    first = mixed if name in ("in_proj_qkv.weight", "conv1d.weight") else 0
    rest = value[first:]
    return (value[:first], rest.view(keys, shared, -1, *rest.shape[1:]).swapaxes(0, 1))


def linear_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`Qwen3NextModel.set_gguf_parameters`."""
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(4)


def kimi_tensors(path: str, value: Tensor, name_of: Callable[[str], str]) -> Iterator[tuple[str, Any, Any]]:
    """As `linear_tensors`, of what `KimiLinearModel.modify_tensors` changes or Kimi's checkpoint calls otherwise."""
    if path.endswith("conv1d.weight"):
        for part, third in zip("qkv", value.chunk(3), strict=True):
            yield name_of(path.replace("conv1d", f"{part}_conv1d")), (third,), (1, len(third), 1, third.shape[-1])
        return
    called = path.replace("forget_gate.", "").replace("dt_bias", "dt_proj.bias")
    yield name_of(called), (value,), tuple(value.shape)


def kimi_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`KimiLinearModel.set_gguf_parameters`."""
    writer.add_head_count_kv([int(kind != "linear_attention") for kind in config["layer_types"]])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
