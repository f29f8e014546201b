"""Parameters of linear attention and of Mamba whose rows llama.cpp's converter puts in another order, or changes
(`Qwen3NextModel`, `Mamba2Model` and `JambaModel` of the converter), and the fields of the config that say their
sizes."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_checkpoint import Change, Rows
from tiermoe.formats.gguf_file import AGAIN, GgufFile
from tiermoe.formats.gguf_header import GgufTensor
from tiermoe.kernels.delta import DeltaSizes
from tiermoe.model.attention.mamba import MambaSizes

_TILED = ("qwen35moe", "qwen4exp")
"""The architectures whose heads of values are in another order (`tiled_rows`)."""


def linear_config(file: GgufFile) -> dict[str, Any]:
    """Fields of the config: layers with linear attention, and its sizes. ModelError where an entry is missing."""
    sizes = _sizes(file)
    return {
        "layer_types": ["linear_attention" if each else "full_attention" for each in file.linear_layers],
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.heads,
        "linear_key_head_dim": sizes.key_columns,
        "linear_value_head_dim": sizes.value_columns,
        "linear_conv_kernel_dim": sizes.kept + 1,
    }


def linear_rows(file: GgufFile, stem: str, tensor: GgufTensor) -> dict[str, Rows]:
    """The parameters of a layer's linear attention that a tensor holds, by their names in it; none of other tensors.
    ModelError where it has not as many rows as the file's entries say."""
    sizes = _sizes(file)
    values, heads = _tiled(file, sizes, sizes.value_columns), _tiled(file, sizes, 1)
    if stem == "ssm_norm":
        return {"norm.weight": Rows(tensor, tensor.shape)}
    if stem == "ssm_out":
        return {"out_proj.weight": Rows(tensor, tensor.shape, columns=values)}
    if stem in ("ssm_ba", "ssm_in"):
        return _joined_rows(file, stem, tensor, sizes)
    mixed = None if values is None else rows_after(sizes.channels - sizes.values, values)
    found: dict[str, tuple[str, int, Tensor | None]] = {
        "attn_qkv": ("in_proj_qkv.weight", sizes.channels, mixed),
        "attn_gate": ("in_proj_z.weight", sizes.values, values),
        "ssm_beta": ("in_proj_b.weight", sizes.heads, heads),
        "ssm_alpha": ("in_proj_a.weight", sizes.heads, heads),
        "ssm_conv1d": ("conv1d.weight", sizes.channels, mixed),
        "ssm_dt": ("dt_bias", sizes.heads, heads),
        "ssm_a": ("A_log", sizes.heads, heads),
    }
    if stem not in found:
        return {}
    name, rows, order = found[stem]
    _check_rows(file, stem, tensor, rows)
    shape = (rows, 1, *tensor.shape[1:]) if stem == "ssm_conv1d" else tensor.shape
    return {name: Rows(tensor, shape, order, change=rates if stem == "ssm_a" else None)}


def _joined_rows(file: GgufFile, stem: str, tensor: GgufTensor, sizes: DeltaSizes) -> dict[str, Rows]:
    """Of a tensor that is several matrices; older converters had one for queries, keys, values and their gates."""
    shared = sizes.heads // sizes.key_heads
    columns = shared * sizes.value_columns
    if stem == "ssm_ba":
        parts = grouped_rows(sizes.key_heads, (shared, shared))
        found = {"in_proj_b.weight": parts[0], "in_proj_a.weight": parts[1]}
    else:
        parts = grouped_rows(sizes.key_heads, (sizes.key_columns, sizes.key_columns, columns, columns))
        found = {"in_proj_qkv.weight": torch.cat(parts[:3]), "in_proj_z.weight": parts[3]}
    _check_rows(file, stem, tensor, sum(map(len, found.values())))
    return {name: Rows(tensor, (len(order), *tensor.shape[1:]), order) for name, order in found.items()}


def rates(stored: Tensor) -> Tensor:
    """transformers' `A_log` of what the file has: -exp(A_log)."""
    return (-stored).log()


def _check_rows(file: GgufFile, stem: str, tensor: GgufTensor, wanted: int) -> None:
    if tensor.shape[0] != wanted:
        raise ModelError(
            f"{file.path}: a layer's {stem} has {tensor.shape[0]} rows, by the file's entries it has {wanted}; {AGAIN}"
        )


def _tiled(file: GgufFile, sizes: DeltaSizes, rows: int) -> Tensor | None:
    """Where the heads of values, of so many rows each, lie; None: in order."""
    if file.architecture not in _TILED or sizes.heads == sizes.key_heads:
        return None
    return tiled_rows(sizes.key_heads, sizes.heads // sizes.key_heads, rows)


def _sizes(file: GgufFile) -> DeltaSizes:
    heads, key_heads = file.count("ssm.time_step_rank", least=1), file.count("ssm.group_count", least=1)
    inner = file.count("ssm.inner_size", least=1)
    if heads % key_heads or inner % heads:
        raise file.refusal(
            f"says that its linear attention has {heads} heads of values, {key_heads} of keys and {inner} columns, "
            f"which do not belong together"
        )
    state, kernel = file.count("ssm.state_size", least=1), file.count("ssm.conv_kernel", least=1)
    sizes = DeltaSizes(key_heads, heads, state, inner // heads, kernel - 1)
    if sizes.channels > file.longest:
        raise file.refusal(
            f"says that its linear attention has {sizes.channels:,} channels, no tensor has more than {file.longest:,} "
            f"rows"
        )
    return sizes


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


# of each row of a parameter, its row in the file; layers share one tensor of each order


@lru_cache(maxsize=8)
def tiled_rows(key_heads: int, shared: int, rows: int) -> Tensor:
    """Heads of so many rows, `shared` of which share a key head, come as the first of every key head, the second of
    every one, … (`_LinearAttentionVReorderBase`)."""
    return torch.arange(key_heads * shared * rows).view(shared, key_heads, rows).swapaxes(0, 1).flatten()


@lru_cache(maxsize=8)
def rows_after(rows: int, order: Tensor) -> Tensor:
    """`order`, of rows that lie after so many that are in order."""
    return torch.cat((torch.arange(rows), rows + order))


@lru_cache(maxsize=8)
def grouped_rows(groups: int, parts: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Each of so many groups has all `parts`, of so many rows: of each part, where that of every group lies."""
    rows = torch.arange(groups * sum(parts)).view(groups, -1)
    return tuple(part.flatten() for part in torch.split(rows, list(parts), dim=1))


# Mamba

_NAMES = {"ssm_in": "in_proj.weight", "ssm_out": "out_proj.weight", "ssm_dt": "dt_bias"}
_NAMES_1 = {
    "ssm_in": "in_proj.weight", "ssm_out": "out_proj.weight", "ssm_x": "x_proj.weight", "ssm_a": "A_log", "ssm_d": "D",
    "ssm_dt_norm": "dt_layernorm.weight", "ssm_b_norm": "b_layernorm.weight", "ssm_c_norm": "c_layernorm.weight",
}  # fmt: skip
_WITH_BIAS = {"ssm_conv1d": "conv1d", "ssm_dt": "dt_proj"}
_FLAT = {"ssm_a": "A_log", "ssm_d": "D", "ssm_norm": "norm.weight"}
"""Tensors that have two dimensions where the parameter has one."""


def mamba_sizes(file: GgufFile) -> MambaSizes:
    """Of the file's layers of Mamba-2. ModelError where an entry is missing, and for sizes that do not belong
    together."""
    heads, groups = file.count("ssm.time_step_rank", least=1), file.count("ssm.group_count", least=1)
    inner, state = file.count("ssm.inner_size", least=1), file.count("ssm.state_size", least=1)
    sizes = MambaSizes(heads, inner // heads, groups, state, file.count("ssm.conv_kernel", least=1) - 1)
    if inner % heads or heads % groups or sizes.projected > file.longest:
        raise file.refusal(
            f"says that its layers of Mamba-2 have {heads} heads in {groups} groups, {inner} columns and states of "
            f"{state}, which no tensor has"
        )
    return sizes


def mamba_rows(_: GgufFile, stem: str, tensor: GgufTensor) -> dict[str, Rows]:
    """The parameter of a layer of Mamba-2 that a tensor holds, by its name in the block; none of other tensors."""
    if stem == "ssm_conv1d":
        return _with_bias(stem, tensor)
    if name := _FLAT.get(stem):
        return {name: Rows(tensor, (math.prod(tensor.shape),), change=rates if stem == "ssm_a" else None)}
    name = _NAMES.get(stem)
    return {name: Rows(tensor, tensor.shape)} if name else {}


def mamba_1_rows(_: GgufFile, stem: str, tensor: GgufTensor) -> dict[str, Rows]:
    """`mamba_rows` of a layer of Mamba-1."""
    if stem in _WITH_BIAS:
        return _with_bias(stem, tensor)
    name = _NAMES_1.get(stem)
    return {name: Rows(tensor, tensor.shape, change=rates if stem == "ssm_a" else None)} if name else {}


def _with_bias(stem: str, tensor: GgufTensor) -> dict[str, Rows]:
    """A weight or a bias, by its dimensions; the file has no dimensions of size 1."""
    weight, shape = len(tensor.shape) == 2, tensor.shape
    if weight and stem == "ssm_conv1d":
        shape = (shape[0], 1, shape[1])
    return {f"{_WITH_BIAS[stem]}.{'weight' if weight else 'bias'}": Rows(tensor, shape)}


_KINDS = {"ssm_a": "linear_attention", "attn_q.weight": "full_attention", "ffn_gate_inp.weight": "moe"}
"""A tensor of the layers of one kind → the kind. Those with attention may have experts, too."""


def layer_kinds(file: GgufFile) -> list[str]:
    """`layer_types` of a config: which layers have Mamba, and which attention; of those with neither, which have
    experts."""
    layers = range(file.layers)
    return [
        next((kind for tensor, kind in _KINDS.items() if f"blk.{at}.{tensor}" in file.tensors), "mlp") for at in layers
    ]
