"""Checkpoint of a GGUF file: the parameters of transformers' model, the tensors that each is made of, and the experts
for packing. Families say what their tensors are called (`families.gguf.Gguf`)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_checkpoint import Change, Expanding, GgufCheckpoint, Joined, Parameter, Rows, Stacked
from tiermoe.formats.gguf_file import AGAIN, GgufFile
from tiermoe.formats.gguf_header import GgufTensor
from tiermoe.model.families import FAMILIES
from tiermoe.model.families.family import Family
from tiermoe.model.families.gguf import Config, Gguf
from tiermoe.model.families.rows import rates
from tiermoe.model.moe import FIRST, SECOND, UNGATED
from tiermoe.model.weights import inside
from tiermoe.types import MoeLayer, Part, Segment

_NEXTN = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "layer_output_norm": "shared_head.norm",  # MiMo's
}
_COPIES = ("nextn.embed_tokens", "nextn.shared_head_head")
"""Tensors of an MTP head that are the model's embedding and output layer."""
_IN_BLOCK = re.compile(r"blk\.(\d+)\.([\w.]+?)(?:\.(weight|bias))?")
_OUTSIDE = re.compile(r"(\w+)\.(weight|bias)")
_EXPERTS = re.compile(r"ffn_(gate_up|gate|up|down)_exps")
_TURNED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
_BARE = (
    "sinks", "e_score_correction_bias", "expert_bias", "dt_bias", "A_log", "tid2eid", "position_bias",
    "router.scale", "per_expert_scale", "layer_scalar",
    "index_kpool_compress_ape", "index_kpool_compress_gate",
    *(f"{owner}{name}" for owner in ("_hc.", "hc_head.hc_") for name in ("fn", "base", "scale")),
)  # fmt: skip
"""Parameters whose path has no 'weight' or 'bias' at its end."""
_TABLE = "tid2eid.weight"
"""The end of the name of a table of tokens' experts."""
_CONVOLVED = tuple(f"ssm_conv1d_{part}" for part in "qkv")
"""Tensors of a block whose rows are those of Kimi's convolution."""
_DEPTHWISE = ("conv.conv", "ple.conv1d")
"""Convolutions of each channel by itself, whose channels take one input."""
_NORMS = ("norm.weight", *(f".norm_{name}.weight" for name in ("key", "query", "conv")))
_OF_ONE = ("shared_expert_gate", "moe_statics.e_score_correction_bias")
"""Parameters of one row, which the file has as a vector."""


def family_in(file: GgufFile) -> tuple[Family, Gguf]:
    """The family of a file, and its names there. ModelError if there is none, or the file is of a dense model."""
    name = file.architecture
    if not file.count("expert_count", 0):
        raise file.refusal(
            f"is a '{name}' model without experts: tiermoe runs Mixture-of-Experts models", "llama.cpp runs a dense one"
        )
    architectures = {
        each: (family, form)
        for family in FAMILIES.values()
        if (form := vars(type(family)).get("gguf")) is not None
        for each in form.architectures
    }
    if name not in architectures:
        raise file.refusal(
            f"is of the architecture '{name}', which tiermoe does not read from GGUF files; it reads "
            f"{', '.join(sorted(architectures))}",
            "take the model's safetensors",
        )
    return architectures[name]


def config_of(file: GgufFile) -> Config:
    """The fields of transformers' config, with 'model_type'. ModelError as `family_in`, or if the file lacks an
    entry."""
    family, _ = family_in(file)
    config = {"model_type": family.model_type, **family.config(file)}
    if (used := config["num_experts_per_tok"]) > file.experts:
        raise file.refusal(f"says that a token uses {used} of {file.experts} experts")
    return config


def open_checkpoint(file: GgufFile) -> GgufCheckpoint:
    """The checkpoint in a file. ModelError for a tensor that its architecture does not have, and where experts lack
    one."""
    family, form = family_in(file)
    unread = family.gguf_unread(file) if family.gguf_unread is not None else frozenset()
    parameters: dict[str, Parameter] = {} if family.gguf_made is None else family.gguf_made(file)
    for name, tensor in file.tensors.items():
        if tensor.kind.name == "I32" and not name.endswith(_TABLE):
            raise ModelError(f"{file.path}: {name} is stored as I32, in which only tables of experts are; {AGAIN}")
        if name in form.apart or name in unread:
            continue
        if (path := _outside(form, name)) is not None:
            parameters[path] = Rows(tensor, tensor.shape, change=_change(form, path))
        elif (found := _IN_BLOCK.fullmatch(name)) and int(found[1]) < file.layers:
            parameters |= _in_block(file, family, form, form.names, tensor, int(found[1]), found[2], found[3])
        elif not found:
            raise _unknown(file, name)
    for layer in range(file.layers):
        parameters |= _expanding(file, layer) | _convolution(file, layer)
        parameters |= _gate_up(file, form, layer) | _expert_scales(file, form.names, layer)
        if layer not in file.dense_layers:
            parameters |= expert_parameters(file, layer, form.experts)
    if form.part_of:
        parameters = {inside(path): parameter for path, parameter in parameters.items()}
    return GgufCheckpoint(file, parameters)


def mtp_parameters(file: GgufFile, dense: bool = False) -> dict[str, Parameter]:
    """Path → parameter of the MTP head after the last layer (llama.cpp's NextN); empty if the file has none. dense:
    its layer has no experts. ModelError as `open_checkpoint`."""
    (family, form), layer = family_in(file), file.layers
    names = {**form.names, **_NEXTN}
    parameters: dict[str, Parameter] = {}
    for name, tensor in file.tensors.items():
        found = _IN_BLOCK.fullmatch(name)
        if found and int(found[1]) == layer and found[2] not in _COPIES:
            parameters |= _in_block(file, family, form, names, tensor, layer, found[2], found[3])
    if not parameters:
        return {}
    experts = {} if dense else expert_parameters(file, layer, form.experts)
    return parameters | experts | _expanding(file, layer)


def compute_dtype(checkpoint: GgufCheckpoint) -> torch.dtype:
    """Dtype in which a model in a GGUF file is computed: that of its experts where they have one, else bfloat16."""
    dtypes = {
        tensor.kind.dtype
        for parameter in checkpoint.parameters.values()
        if isinstance(parameter, Stacked) and len(parameter.shape) == 3
        for tensor in parameter.tensors
    }
    only = dtypes.pop() if len(dtypes) == 1 else None
    return only or torch.bfloat16


def _outside(form: Gguf, name: str) -> str | None:
    found = _OUTSIDE.fullmatch(name)
    if found and found[1] == "output":
        return f"lm_head.{found[2]}"
    path = form.outside.get(found[1]) if found else None
    return f"model.{_with_suffix(path, found[2])}" if found and path else None


def _in_block(
    file: GgufFile,
    family: Family,
    form: Gguf,
    names: Mapping[str, str],
    tensor: GgufTensor,
    layer: int,
    stem: str,
    suffix: str | None,
) -> dict[str, Parameter]:
    """Path → parameter of a tensor of a layer. names: tensors of a block → modules."""
    fused = (f"ffn_{part}{end}" for part in ("gate", "up") for end in form.fused)
    if _EXPERTS.fullmatch(stem) or stem in ("attn_k_b", "attn_v_b", *_CONVOLVED, *fused, *form.apart):
        return {}  # of several tensors each
    prefix = f"model.layers.{layer}"
    if family.gguf_parts is not None and (found := family.gguf_parts(file, stem, tensor)):
        return {f"{prefix}.{form.within}.{name}": rows for name, rows in found.items()}
    path = names.get(stem)
    if path is None:
        raise _unknown(file, f"blk.{layer}.{stem}" + (f".{suffix}" if suffix else ""))
    order = None if family.gguf_order is None else family.gguf_order(file, stem, tensor.shape[0])
    if form.turned and stem in _TURNED:
        heads = file.largest(_TURNED[stem])
        if tensor.shape[0] % (2 * heads):
            raise file.refusal(f"says that {stem} of {tensor.shape[0]} rows has {heads} heads")
        order = _turned_rows(tensor.shape[0], heads)
    full = _with_suffix(path, suffix)
    return {f"{prefix}.{full}": Rows(tensor, _shape(path, tensor), order, change=_change(form, full))}


def _with_suffix(path: str, suffix: str | None) -> str:
    """The parameter that a tensor is, of the module at `path`."""
    return path if path.endswith(_BARE) else f"{path}.{suffix}"


def _shape(path: str, tensor: GgufTensor) -> tuple[int, ...]:
    """The parameter's: the file has no dimensions of size 1."""
    if path.endswith(_OF_ONE) and len(tensor.shape) == 1:
        return (1, *tensor.shape)
    if path.endswith(_DEPTHWISE) and len(tensor.shape) == 2:
        return (tensor.shape[0], 1, tensor.shape[1])
    if path.endswith("A_log"):
        return (1, 1, math.prod(tensor.shape), 1)
    return tensor.shape


def _change(form: Gguf, path: str) -> Change | None:
    if path.endswith("A_log"):
        return rates
    return _centred if form.centred and path.endswith(_NORMS) else None


def _centred(stored: torch.Tensor) -> torch.Tensor:
    return stored - 1


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


def _convolution(file: GgufFile, layer: int) -> dict[str, Parameter]:
    """The convolution of a layer of Kimi's linear attention, of which the file has three parts."""
    found = [file.tensors.get(f"blk.{layer}.{stem}.weight") for stem in _CONVOLVED]
    parts = [tensor for tensor in found if tensor is not None]
    if not parts:
        return {}
    if len(parts) != len(found) or any(len(part.shape) < 2 for part in parts):
        raise ModelError(
            f"{file.path}: layer {layer} lacks a part of its convolution ({', '.join(_CONVOLVED)}); {AGAIN}"
        )
    taps = [replace(part, shape=(math.prod(part.shape[:-1]), 1, part.shape[-1])) for part in parts]
    return {f"model.layers.{layer}.self_attn.conv1d.weight": Joined(tuple(taps))}


def _gate_up(file: GgufFile, form: Gguf, layer: int) -> dict[str, Parameter]:
    """The matrices of a layer's dense block and shared expert that are both gate and up; none of what is not there."""
    found: dict[str, Parameter] = {}
    for end, path in form.fused.items():
        gate, up = (file.tensors.get(f"blk.{layer}.ffn_{part}{end}.weight") for part in ("gate", "up"))
        if gate is None and up is None:
            continue
        if gate is None or up is None or gate.shape != up.shape or len(gate.shape) != 2:
            shapes = [None if each is None else each.shape for each in (gate, up)]
            raise ModelError(
                f"{file.path}: ffn_gate{end} and ffn_up{end} of layer {layer} have the shapes {shapes}; {AGAIN}"
            )
        found[f"model.layers.{layer}.{path}.weight"] = Joined((gate, up))
    return found


def _expert_scales(file: GgufFile, names: Mapping[str, str], layer: int) -> dict[str, Parameter]:
    """The scales of a layer's experts (Gemma 4) where NVFP4's factors of their last matrix have them in: all are 1."""
    path, down = names.get("ffn_down_exps.scale"), file.tensors.get(f"blk.{layer}.ffn_down_exps.weight")
    if path is None or down is None or down.factors is None:
        return {}
    return {f"model.layers.{layer}.{path}": Rows(down.factors, down.factors.shape, change=torch.ones_like)}


def _unknown(file: GgufFile, name: str) -> ModelError:
    return file.refusal(
        f"holds the tensor {name}, which no model of the architecture '{file.architecture}' that tiermoe computes has",
        "take the model's safetensors",
    )


@lru_cache(maxsize=8)
def _turned_rows(rows: int, heads: int) -> Tensor:
    """The two halves of each of so many heads take turns (`LlamaModel.permute`), so that llama.cpp's rotary embedding
    turns neighbours."""
    return torch.arange(rows).view(heads, -1, 2).swapaxes(1, 2).flatten()


# experts

_CONVERTED = 12  # bytes a weight: blocks, float32, and joined in the compute dtype


def expert_parameters(file: GgufFile, layer: int, block: str) -> dict[str, Parameter]:
    """The stacked matrices and biases of a layer's experts. ModelError if one is missing."""
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
        if "down" not in there or there.keys() - {"down"} not in ({"gate_up"}, {"gate", "up"}, {"up"}):
            raise file.refusal(
                f"holds of layer {layer}'s experts {', '.join(there) or 'nothing'} ({suffix}), not gate, up and down",
                "download it again, or convert the model with a current llama.cpp",
            )
        dimensions = 3 if suffix == "weight" else 2
        for matrix, tensor in there.items():
            if len(tensor.shape) != dimensions or tensor.shape[0] != there["down"].shape[0]:
                raise ModelError(
                    f"{file.path}: the {suffix} {matrix} of layer {layer}'s experts has shape {tensor.shape}; {AGAIN}"
                )
        prefix, name = f"model.layers.{layer}.{block}", UNGATED if first == [there.get("up")] else FIRST
        found |= {f"{prefix}.{name}{end}": Stacked(tuple(first)), f"{prefix}.{SECOND}{end}": Stacked((there["down"],))}
    return found


class GgufExperts:
    """`formats.source.ExpertSource` of a GGUF file. model: on the meta device, with `shells` for experts by path.
    Matrices are (out, in) whatever the family's own are, and gate comes before up. ModelError if config and tensors
    do not belong together."""

    def __init__(
        self, model: Any, shells: Mapping[str, Any], checkpoint: GgufCheckpoint, dtype: torch.dtype, top_k: int
    ) -> None:
        self.checkpoint, self.dtype = checkpoint, dtype
        self.layers = [_layer_of(name, shell, top_k) for name, shell in shells.items()]
        self.expert_keys = {f"{layer.name}.{part.name}" for layer in self.layers for part in layer.parts}
        self._check(model)

    def direct_key(self, parameter: str) -> str | None:
        """The checkpoint key that becomes a dense parameter: its own."""
        return parameter if parameter in self.checkpoint and parameter not in self.expert_keys else None

    def row_keys(self, parameter: str) -> tuple[str, ...]:
        """The checkpoint keys that hold a dense parameter's rows: its own."""
        direct = self.direct_key(parameter)
        return () if direct is None else (direct,)

    def read(self, layer: int, expert: int) -> Mapping[str, torch.Tensor]:
        name = self.layers[layer].name
        return {
            part.name: self.checkpoint.read(f"{name}.{part.name}", expert)[0].to(self.dtype)
            for part in self.layers[layer].parts
        }

    def sources(self, layer: int) -> dict[str, tuple[str, ...]]:
        """Each part is a parameter of its own."""
        own = self.layers[layer]
        return {part.name: (f"{own.name}.{part.name}",) for part in own.parts}

    def reading_bytes(self) -> int:
        """Largest memory of `read` beside the result, in bytes."""
        return _CONVERTED * max(math.prod(part.shape) for layer in self.layers for part in layer.parts)

    def in_place(self, layer: int, expert: int) -> list[Segment] | None:
        """None: `formats.source` has the places of experts, with their types."""

    def _check(self, model: Any) -> None:
        entries = self.checkpoint.tensors
        wanted = {path: tuple(tensor.shape) for path, tensor in model.state_dict().items()}
        for layer in self.layers:
            wanted |= {f"{layer.name}.{part.name}": (layer.experts, *part.shape) for part in layer.parts}
        for path, shape in wanted.items():
            if path in entries and entries[path].shape != shape:
                raise ModelError(
                    f"{self.checkpoint.directory}: {path} has the shape {entries[path].shape}, by the file's entries "
                    f"it has {shape}; download it again"
                )
        missing = sorted(key for key in self.expert_keys if key not in entries)
        unknown = sorted(set(entries) - set(wanted))
        if missing or unknown:
            raise ModelError(
                f"{self.checkpoint.directory} {'lacks' if missing else 'holds'} {(missing or unknown)[0]}, which this "
                f"family {'has' if missing else 'has not'}; convert the model again with a current llama.cpp"
            )


def _layer_of(name: str, shell: Any, top_k: int) -> MoeLayer:
    parts = tuple(Part(part, shape) for part, shape in shell.expert_shapes.items())
    if shell.is_transposed:
        parts = tuple(replace(part, shape=part.shape[::-1]) if part.is_matrix else part for part in parts)
    return MoeLayer(name, shell.num_experts, top_k, parts)
