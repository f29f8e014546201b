"""Linear attention in GGUF files of Qwen3-Next, Qwen3.5 and Qwen3.8 (`Qwen3NextModel` of the converter): the
config's fields, and the parameters whose rows the converter has put in another order."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_checkpoint import Rows
from tiermoe.formats.gguf_file import GgufFile, GgufTensor
from tiermoe.kernels.delta import DeltaSizes
from tiermoe.model.gguf.shapes import linear_layers

_TILED = ("qwen35moe", "qwen4exp")
"""The architectures whose heads of values are in another order (`tiled_rows`)."""


def linear_config(file: GgufFile) -> dict[str, Any]:
    """Fields of the config: layers with linear attention, and its sizes. ModelError where an entry is missing."""
    sizes = _sizes(file)
    linear = linear_layers(file)
    return {
        "layer_types": ["linear_attention" if each else "full_attention" for each in linear],
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
    if stem == "ssm_norm":
        return {"norm.weight": Rows(tensor, tensor.shape)}
    if stem == "ssm_out":
        return {"out_proj.weight": Rows(tensor, tensor.shape, columns=_heads(file, sizes, sizes.value_columns))}
    found = _by_rows(file, sizes, stem)
    if found:
        _check_rows(file, stem, tensor, sizes)
    return {name: _rows(tensor, name, order) for name, order in found.items()}


def _by_rows(file: GgufFile, sizes: DeltaSizes, stem: str) -> dict[str, Tensor | None]:
    """Parameter → the rows of a tensor that it consists of; None: all in order."""
    values = _heads(file, sizes, sizes.value_columns)
    mixed = None if values is None else rows_after(sizes.channels - sizes.values, values)
    heads = _heads(file, sizes, 1)
    shared = sizes.heads // sizes.key_heads
    if stem == "ssm_ba":
        both = grouped_rows(sizes.key_heads, (shared, shared))
        return dict(zip(("in_proj_b.weight", "in_proj_a.weight"), both, strict=True))
    if stem == "ssm_in":  # of older converters
        columns = shared * sizes.value_columns
        parts = grouped_rows(sizes.key_heads, (sizes.key_columns, sizes.key_columns, columns, columns))
        return {"in_proj_qkv.weight": torch.cat(parts[:3]), "in_proj_z.weight": parts[3]}
    name, order = {
        "attn_qkv": ("in_proj_qkv.weight", mixed),
        "attn_gate": ("in_proj_z.weight", values),
        "ssm_beta": ("in_proj_b.weight", heads),
        "ssm_alpha": ("in_proj_a.weight", heads),
        "ssm_conv1d": ("conv1d.weight", mixed),
        "ssm_dt": ("dt_bias", heads),
        "ssm_a": ("A_log", heads),
    }.get(stem, ("", None))
    return {name: order} if name else {}


def _rows(tensor: GgufTensor, name: str, order: Tensor | None) -> Rows:
    rows = tensor.shape[0] if order is None else len(order)
    shape = (rows, *tensor.shape[1:])
    if name == "conv1d.weight":
        shape = (rows, 1, *tensor.shape[1:])
    return Rows(tensor, shape, order, change=rates if name == "A_log" else None)


def rates(stored: Tensor) -> Tensor:
    """transformers' `A_log` of what the file has: -exp(A_log)."""
    return (-stored).log()


def _check_rows(file: GgufFile, stem: str, tensor: GgufTensor, sizes: DeltaSizes) -> None:
    wanted = {
        "attn_qkv": sizes.channels,
        "ssm_conv1d": sizes.channels,
        "attn_gate": sizes.values,
        "ssm_in": sizes.channels + sizes.values,
        "ssm_ba": 2 * sizes.heads,
    }.get(stem, sizes.heads)
    if tensor.shape[0] != wanted:
        raise ModelError(
            f"{file.path}: a layer's {stem} has {tensor.shape[0]} rows, by the file's entries it has {wanted}; "
            f"download it again"
        )


def _heads(file: GgufFile, sizes: DeltaSizes, rows: int) -> Tensor | None:
    """Where the heads of values, of so many rows each, lie; None: in order."""
    if file.architecture not in _TILED or sizes.heads == sizes.key_heads:
        return None
    return tiled_rows(sizes.key_heads, sizes.heads // sizes.key_heads, rows)


def _sizes(file: GgufFile) -> DeltaSizes:
    heads, key_heads = file.count("ssm.time_step_rank", least=1), file.count("ssm.group_count", least=1)
    inner = file.count("ssm.inner_size", least=1)
    if heads % key_heads or inner % heads:
        raise ModelError(
            f"{file.path} says that its linear attention has {heads} heads of values, {key_heads} of keys and "
            f"{inner} columns, which do not belong together; download it again"
        )
    state, kernel = file.count("ssm.state_size", least=1), file.count("ssm.conv_kernel", least=1)
    sizes = DeltaSizes(key_heads, heads, state, inner // heads, kernel - 1)
    if sizes.channels > file.longest:
        raise ModelError(
            f"{file.path} says that its linear attention has {sizes.channels:,} channels, no tensor has more than "
            f"{file.longest:,} rows; download it again"
        )
    return sizes


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
