"""Which tensors of a GGUF file are which parameters of transformers' model."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from tiermoe.errors import ModelError
from tiermoe.model.gguf import orders
from tiermoe.model.gguf.architectures import BLOCK, TOP, GgufArchitecture, architecture_of
from tiermoe.model.gguf.shapes import AGAIN, blocks, dense_layers
from tiermoe.store.gguf.checkpoint import GgufCheckpoint
from tiermoe.store.gguf.file import GgufFile
from tiermoe.store.gguf.header import GgufTensor
from tiermoe.store.gguf.parameter import Change, Expanding, Parameter, Rows, Stacked
from tiermoe.store.gguf.values import whole

_IN_BLOCK = re.compile(r"blk\.(\d+)\.([\w.]+?)(?:\.(weight|bias))?")
_OUTSIDE = re.compile(r"(\w+)\.(weight|bias)")
_EXPERTS = re.compile(r"ffn_(gate_up|gate|up|down)_exps")
_TURNED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
_BARE = ("sinks", "e_score_correction_bias", "expert_bias")
"""Parameters whose own name is their path's end."""
_OF_ONE = ("shared_expert_gate", "moe_statics.e_score_correction_bias")
"""Parameters of one row, which the file has as a vector."""

FIRST, SECOND = "gate_up_proj", "down_proj"
"""What all families call the stacked matrices of a layer's experts."""


def open_checkpoint(file: GgufFile) -> GgufCheckpoint:
    """The checkpoint in a file. ModelError for a tensor that its architecture does not have, and where experts lack
    one."""
    architecture = architecture_of(file)
    parameters: dict[str, Parameter] = {}
    for name, tensor in file.tensors.items():
        if (path := _outside(name)) is not None:
            parameters[path] = Rows(tensor, tensor.shape, change=_change(architecture, path))
        elif (found := _IN_BLOCK.fullmatch(name)) and int(found[1]) < blocks(file):
            parameters |= _in_block(file, architecture, tensor, int(found[1]), found[2], found[3])
        elif not found:
            raise _unknown(file, name)
    dense = set(dense_layers(file))
    for layer in range(blocks(file)):
        parameters |= _expanding(file, layer)
        if layer not in dense:
            parameters |= _experts(file, layer, architecture.experts)
    return GgufCheckpoint(file, parameters)


def compute_dtype(checkpoint: GgufCheckpoint) -> torch.dtype:
    """What a model in a GGUF file is computed in: in the dtype of its experts where that is one, else in bfloat16."""
    dtypes = {
        tensor.kind.dtype
        for parameter in checkpoint.parameters.values()
        if isinstance(parameter, Stacked) and len(parameter.shape) == 3
        for tensor in parameter.tensors
    }
    only = dtypes.pop() if len(dtypes) == 1 else None
    return only or torch.bfloat16


def _outside(name: str) -> str | None:
    found = _OUTSIDE.fullmatch(name)
    return f"{TOP[found[1]]}.{found[2]}" if found and found[1] in TOP else None


def _in_block(
    file: GgufFile, architecture: GgufArchitecture, tensor: GgufTensor, layer: int, stem: str, suffix: str | None
) -> dict[str, Parameter]:
    if _EXPERTS.fullmatch(stem) or stem in ("attn_k_b", "attn_v_b"):
        return {}  # of several tensors each
    prefix = f"model.layers.{layer}"
    if architecture.linear is not None and (found := architecture.linear(file, stem, tensor)):
        return {f"{prefix}.linear_attn.{name}": rows for name, rows in found.items()}
    path = {**BLOCK, **architecture.more}.get(stem)
    if path is None:
        raise _unknown(file, f"blk.{layer}.{stem}" + (f".{suffix}" if suffix else ""))
    order = None
    if architecture.turned and stem in _TURNED:
        heads = whole(file, _TURNED[stem])
        if tensor.shape[0] % (2 * heads):
            raise ModelError(f"{file.path} says that {stem} of {tensor.shape[0]} rows has {heads} heads; {AGAIN}")
        order = orders.turned(tensor.shape[0], heads)
    full = path if path.endswith(_BARE) else f"{path}.{suffix}"
    return {f"{prefix}.{full}": Rows(tensor, _shape(path, tensor), order, change=_change(architecture, full))}


def _shape(path: str, tensor: GgufTensor) -> tuple[int, ...]:
    """The parameter's: the file has no dimensions of size 1."""
    if path.endswith(_OF_ONE) and len(tensor.shape) == 1:
        return (1, *tensor.shape)
    if path.endswith("conv.conv") and len(tensor.shape) == 2:
        return (tensor.shape[0], 1, tensor.shape[1])
    return tensor.shape


def _change(architecture: GgufArchitecture, path: str) -> Change | None:
    return _centred if architecture.centred and path.endswith("norm.weight") else None


def _centred(stored: torch.Tensor) -> torch.Tensor:
    return stored - 1


def _experts(file: GgufFile, layer: int, block: str) -> dict[str, Parameter]:
    """The stacked matrices and biases of a layer's experts. ModelError where one is missing."""
    found: dict[str, Parameter] = {}
    for suffix, end in (("weight", ""), ("bias", "_bias")):
        there = {
            matrix: file.tensors[name]
            for matrix in ("gate_up", "gate", "up", "down")
            if (name := f"blk.{layer}.ffn_{matrix}_exps.{suffix}") in file.tensors
        }
        if suffix == "bias" and not there:
            continue
        first = [there[matrix] for matrix in ("gate_up", "gate", "up") if matrix in there]
        if "down" not in there or there.keys() - {"down"} not in ({"gate_up"}, {"gate", "up"}):
            raise ModelError(
                f"{file.path} holds of layer {layer}'s experts {_named(there)} ({suffix}), not gate, up and down; "
                f"download it again, or convert the model with a current llama.cpp"
            )
        dimensions = 3 if suffix == "weight" else 2
        for matrix, tensor in there.items():
            if len(tensor.shape) != dimensions or tensor.shape[0] != there["down"].shape[0]:
                raise ModelError(
                    f"{file.path}: the {suffix} {matrix} of layer {layer}'s experts has shape {tensor.shape}; {AGAIN}"
                )
        prefix = f"model.layers.{layer}.{block}"
        found |= {f"{prefix}.{FIRST}{end}": Stacked(tuple(first)), f"{prefix}.{SECOND}{end}": Stacked((there["down"],))}
    return found


def _named(there: Mapping[str, GgufTensor]) -> str:
    return ", ".join(there) or "nothing"


def _expanding(file: GgufFile, layer: int) -> dict[str, Parameter]:
    """DeepSeek's kv_b_proj, where the file has it in two."""
    keys, values = (file.tensors.get(f"blk.{layer}.attn_{part}_b.weight") for part in "kv")
    if keys is None or values is None:
        return {}
    if len(keys.shape) != 3 or len(values.shape) != 3 or values.shape[::2] != keys.shape[:2]:
        raise ModelError(
            f"{file.path}: layer {layer}'s attn_k_b of shape {keys.shape} and attn_v_b of {values.shape} do not belong "
            f"together; {AGAIN}"
        )
    return {f"model.layers.{layer}.self_attn.kv_b_proj.weight": Expanding(keys, values)}


def _unknown(file: GgufFile, name: str) -> ModelError:
    return ModelError(
        f"{file.path} holds the tensor {name}, which no model of the architecture '{file.architecture}' that tiermoe "
        f"computes has; take the model's safetensors"
    )
