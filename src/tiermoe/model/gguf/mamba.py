"""Layers of Mamba in GGUF files (`Mamba2Model` and `JambaModel` of the converter): the sizes, and the parameters that
the converter has changed."""

from __future__ import annotations

import math

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_checkpoint import Rows
from tiermoe.formats.gguf_file import GgufFile, GgufTensor
from tiermoe.model.attention.mamba import MambaSizes
from tiermoe.model.gguf.linear_attention import rates
from tiermoe.model.gguf.shapes import AGAIN

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
        raise ModelError(
            f"{file.path} says that its layers of Mamba-2 have {heads} heads in {groups} groups, {inner} columns and "
            f"states of {state}, which no tensor has; {AGAIN}"
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
