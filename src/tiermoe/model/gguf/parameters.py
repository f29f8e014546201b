"""Parameters of transformers' model in a GGUF file: llama.cpp's architectures of MoE models, an entry each, and the
tensors that each parameter is made of. The converter is llama.cpp's `conversion/`, a class an architecture."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_checkpoint import Change, Expanding, GgufCheckpoint, Joined, Parameter, Rows, Stacked
from tiermoe.formats.gguf_file import GgufFile, GgufTensor
from tiermoe.model.architecture import Architecture
from tiermoe.model.families.table import ARCHITECTURES as FAMILIES
from tiermoe.model.gguf import config as configs
from tiermoe.model.gguf import mamba_configs
from tiermoe.model.gguf.config import Config
from tiermoe.model.gguf.deepseek4 import NAMES as DEEPSEEK4
from tiermoe.model.gguf.deepseek4 import deepseek4
from tiermoe.model.gguf.dots1 import dots1
from tiermoe.model.gguf.experts import expert_parameters
from tiermoe.model.gguf.frequencies import FREQUENCIES, LONG_FACTORS
from tiermoe.model.gguf.gemma4 import NAMES as GEMMA4
from tiermoe.model.gguf.gemma4 import gemma4
from tiermoe.model.gguf.glm5_next import NAMES as GLM5_NEXT
from tiermoe.model.gguf.glm5_next import glm5_next
from tiermoe.model.gguf.hunyuan3 import hunyuan3
from tiermoe.model.gguf.hy4 import NAMES as HY4
from tiermoe.model.gguf.hy4 import hy4, rotated_rows
from tiermoe.model.gguf.latent_indexers import INDEXER as LATENT_INDEXER
from tiermoe.model.gguf.latent_indexers import deepseek32, glm_dsa, shared_indexers
from tiermoe.model.gguf.linear_attention import linear_rows, rates
from tiermoe.model.gguf.ling import NAMES as LING
from tiermoe.model.gguf.ling import bailingmoe3, negative_rates, positive_rates
from tiermoe.model.gguf.llama4 import llama4
from tiermoe.model.gguf.mamba import mamba_1_rows, mamba_rows
from tiermoe.model.gguf.mellum import mellum
from tiermoe.model.gguf.mimo2 import mimo2, qkv_parts
from tiermoe.model.gguf.minimax import INDEXER, minimaxm2, minimaxm3
from tiermoe.model.gguf.phimoe import phimoe
from tiermoe.model.gguf.qwen4 import APART, MIXER, qwen4_parameters, qwen4exp
from tiermoe.model.gguf.qwen4 import NAMES as QWEN4
from tiermoe.model.gguf.shapes import AGAIN, blocks, dense_layers, experts
from tiermoe.model.weights import inside

_TOP = {
    "token_embd": "embed_tokens", "output_norm": "norm", "token_embd_norm": "norm",
    **{f"output_hc_{name}": f"hc_head.hc_{name}" for name in ("fn", "base", "scale")},
    **{f"output_hc_{tensor}": f"hyper_connection_mixer.{name}" for tensor, name in MIXER.items()},
}  # fmt: skip
"""Tensors outside of blocks → modules of transformers' `model`, by their usual names; the output layer is beside it."""

_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}


def block_names(of: Architecture) -> dict[str, str]:
    """Tensors of a block → modules of a layer, for a family of transformers."""
    attention = of.named("self_attn")
    names = {
        "attn_norm": of.named("input_layernorm"),
        "attn_q": f"{attention}.q_proj",
        "attn_k": f"{attention}.k_proj",
        "attn_v": f"{attention}.v_proj",
        "attn_output": f"{attention}.{of.named('o_proj')}",
        "attn_q_norm": f"{attention}.{of.named('q_norm')}",
        "attn_k_norm": f"{attention}.{of.named('k_norm')}",
        "ffn_norm": of.named("post_attention_layernorm"),
        "ffn_gate_inp": f"{of.block}.{of.gate}",
    }
    for matrix in ("gate", "up", "down"):
        names[f"ffn_{matrix}"] = f"{of.block}.{of.named(f'{matrix}_proj')}"
        if of.shared:
            names[f"ffn_{matrix}_shexp"] = f"{of.block}.{of.shared}.{of.named(f'{matrix}_proj')}"
    if of.shared_beside:
        names["ffn_down_shexp"] = f"{of.shared_beside}.output_linear"
    if of.shared_gate:
        names["ffn_gate_inp_shexp"] = f"{of.block}.{of.shared_gate}"
    if of.latent_experts:
        for tensor, name in zip(("ffn_latent_down", "ffn_latent_up"), of.latent_experts, strict=True):
            names[tensor] = f"{of.block}.{name}"
    if of.correction:
        names["exp_probs_b"] = f"{of.block}.{of.correction}"
    return names | (_LATENT if of.latent else {})


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """One of llama.cpp's architectures."""

    config: Callable[[GgufFile], Config]  # file → fields of transformers' config
    family: str  # model_type of transformers' model, whose names the parameters have
    more: Mapping[str, str] = field(default_factory=dict)  # tensors of a block → modules, beside `block_names`
    turned: bool = False  # the halves of each head's queries and keys take turns (`_turned_rows`)
    order: Callable[[GgufFile, str, int], Tensor | None] | None = None
    """Tensor, its rows → where each row of its parameter is in it; None: in order."""
    apart: tuple[str, ...] = ()  # tensors whose values are the config's, or that `made` takes; of blocks by their stems
    made: Callable[[GgufFile], dict[str, Parameter]] | None = None  # parameters of several tensors, or of entries
    parts: Callable[[GgufFile, str, GgufTensor], dict[str, Rows]] | None = None
    """Tensor → the parameters of linear attention, of Mamba or of attention that it holds, by their names in the block;
    none of other tensors."""
    within: str = "linear_attn"  # that block, where it is not Mamba's
    unread: Callable[[GgufFile], frozenset[str]] | None = None  # file → its tensors that the model does not have
    part_of: str = ""  # model_type of a larger model, where transformers has no class for the text part alone

    @property
    def layers(self) -> Architecture:
        """The family's blocks and their names."""
        return FAMILIES[self.family]

    @property
    def fused(self) -> dict[str, str]:
        """End of the names of gate and up → the module that is both in the model, and in the file is not."""
        of = self.layers
        if of.fused_gate_up:
            return {"": f"{of.block}.gate_up_proj", "_shexp": f"{of.block}.{of.shared}.gate_up_proj"}
        apart = of.shared_beside and "ffn_up_shexp" not in self.more
        return {"_shexp": f"{of.shared_beside}.input_linear"} if apart else {}


_SINKS = {"attn_sinks": "self_attn.sinks"}
_LATE_NORM = {"post_attention_norm": "post_attention_layernorm"}
_AFMOE = _LATE_NORM | {"post_ffw_norm": "post_mlp_layernorm", "attn_gate": "self_attn.gate_proj"}
_KIMI = {
    "ssm_f_a": "self_attn.forget_gate.f_a_proj",
    "ssm_f_b": "self_attn.forget_gate.f_b_proj",
    "ssm_dt": "self_attn.forget_gate.dt_bias",
    "ssm_a": "self_attn.forget_gate.A_log",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
}
_GRANITE_SWA = _SINKS | {"ffn_up_shexp": "shared_mlp.input_linear"}
_CONVOLUTION = {f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")}
_QWEN35 = GgufArchitecture(configs.qwen35moe, "qwen3_5_moe_text", _LATE_NORM, parts=linear_rows)

ARCHITECTURES: dict[str, GgufArchitecture] = {
    "qwen3moe": GgufArchitecture(configs.qwen3moe, "qwen3_moe"),
    "qwen2moe": GgufArchitecture(configs.qwen2moe, "qwen2_moe"),
    "llama": GgufArchitecture(configs.mixtral, "mixtral", turned=True),
    "olmoe": GgufArchitecture(configs.olmoe, "olmoe"),
    "gpt-oss": GgufArchitecture(configs.gpt_oss, "gpt_oss", _LATE_NORM | _SINKS),
    "deepseek": GgufArchitecture(configs.deepseek, "deepseek", turned=True),
    "deepseek2": GgufArchitecture(configs.deepseek2, "deepseek_v3"),  # V2 has the same names, and no correction
    "deepseek32": GgufArchitecture(deepseek32, "deepseek_v32", LATENT_INDEXER),
    "glm-dsa": GgufArchitecture(glm_dsa, "glm_moe_dsa", LATENT_INDEXER, unread=shared_indexers),
    "qwen35moe": _QWEN35,
    # Qwen3-Next's layers, with their projection's matrices apart, as the file has them, are Qwen3.5's
    "qwen3next": _QWEN35,
    "qwen4exp": GgufArchitecture(
        qwen4exp, "qwen4_exp_text", QWEN4, parts=linear_rows, apart=APART, made=qwen4_parameters
    ),
    "kimi-linear": GgufArchitecture(configs.kimi_linear, "kimi_linear", _KIMI),
    "llama4": GgufArchitecture(llama4, "llama4_text", apart=(FREQUENCIES,)),
    "bailingmoe3": GgufArchitecture(bailingmoe3, "bailing_hybrid", LING, parts=positive_rates, within="self_attn"),
    "glm5-next": GgufArchitecture(
        glm5_next,
        "glm5_next_text",
        _KIMI | GLM5_NEXT,
        parts=negative_rates,
        within="self_attn",
        part_of="glm5_next",
    ),
    "dots1": GgufArchitecture(dots1, "dots1"),
    "phimoe": GgufArchitecture(phimoe, "phimoe", apart=LONG_FACTORS),
    "deepseek4": GgufArchitecture(deepseek4, "deepseek_v4", DEEPSEEK4),
    "hy_v4": GgufArchitecture(hy4, "hy_v4", HY4, order=rotated_rows),
    "mimo2": GgufArchitecture(mimo2, "mimo_v2_flash", _SINKS, parts=qkv_parts, within="self_attn"),
    "mistral4": GgufArchitecture(configs.mistral4, "mistral4"),
    "exaone-moe": GgufArchitecture(configs.exaone_moe, "exaone_moe"),
    "afmoe": GgufArchitecture(configs.afmoe, "afmoe", _AFMOE),
    "hunyuan-moe": GgufArchitecture(configs.hunyuan_moe, "hunyuan_v1_moe"),
    "hy_v3": GgufArchitecture(hunyuan3, "hy_v3"),
    "mellum": GgufArchitecture(mellum, "mellum"),
    "gemma4": GgufArchitecture(gemma4, "gemma4_text", GEMMA4, apart=(FREQUENCIES,)),
    "glm4moe": GgufArchitecture(configs.glm4moe, "glm4_moe", _LATE_NORM),
    "lfm2moe": GgufArchitecture(configs.lfm2moe, "lfm2_moe", _CONVOLUTION),
    "minimax-m2": GgufArchitecture(minimaxm2, "minimax_m2"),
    "minimax-m3": GgufArchitecture(minimaxm3, "minimax_m3_vl_text", INDEXER),
    "ernie4_5-moe": GgufArchitecture(configs.ernie45moe, "ernie4_5_moe"),
    "granitemoe": GgufArchitecture(configs.granitemoe, "granitemoeshared", turned=True),
    "granite_swa": GgufArchitecture(configs.granite_swa, "granitemoe_swa", _GRANITE_SWA, turned=True),
    "nemotron_h_moe": GgufArchitecture(mamba_configs.nemotron_h_moe, "nemotron_h", turned=True, parts=mamba_rows),
    "jamba": GgufArchitecture(mamba_configs.jamba, "jamba", parts=mamba_1_rows),
    "granitehybrid": GgufArchitecture(mamba_configs.granitehybrid, "granitemoehybrid", turned=True, parts=mamba_rows),
}

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


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """The entry of a file. ModelError where there is none, or the file is of a dense model."""
    name = file.architecture
    if not file.count("expert_count", 0):
        raise ModelError(
            f"{file.path} is a '{name}' model without experts: tiermoe runs Mixture-of-Experts models; llama.cpp runs "
            f"a dense one"
        )
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{file.path} is of the architecture '{name}', which tiermoe does not read from GGUF files; it reads "
            f"{', '.join(sorted(ARCHITECTURES))}; take the model's safetensors"
        )
    return ARCHITECTURES[name]


def config_of(file: GgufFile) -> Config:
    """The fields of transformers' config, with 'model_type'. ModelError as `architecture_of`, or where the file lacks
    an entry."""
    config = architecture_of(file).config(file)
    used = config["num_experts_per_tok"]
    if used > experts(file):
        raise ModelError(f"{file.path} says that a token uses {used} of {experts(file)} experts; download it again")
    return config


def open_checkpoint(file: GgufFile) -> GgufCheckpoint:
    """The checkpoint in a file. ModelError for a tensor that its architecture does not have, and where experts lack
    one."""
    architecture = architecture_of(file)
    of = architecture.layers
    names = block_names(of) | dict(architecture.more)
    unread = architecture.unread(file) if architecture.unread is not None else frozenset()
    parameters: dict[str, Parameter] = {} if architecture.made is None else architecture.made(file)
    for name, tensor in file.tensors.items():
        if tensor.kind.name == "I32" and not name.endswith(_TABLE):
            raise ModelError(f"{file.path}: {name} is stored as I32, in which only tables of experts are; {AGAIN}")
        if name in architecture.apart or name in unread:
            continue
        if (path := _outside(of, name)) is not None:
            parameters[path] = Rows(tensor, tensor.shape, change=_change(of, path))
        elif (found := _IN_BLOCK.fullmatch(name)) and int(found[1]) < blocks(file):
            parameters |= _in_block(file, architecture, names, tensor, int(found[1]), found[2], found[3])
        elif not found:
            raise _unknown(file, name)
    dense = set(dense_layers(file))
    for layer in range(blocks(file)):
        parameters |= _expanding(file, layer) | _convolution(file, layer)
        parameters |= _gate_up(file, architecture, layer) | _expert_scales(file, names, layer)
        if layer not in dense:
            parameters |= expert_parameters(file, layer, of.experts)
    if architecture.part_of:
        parameters = {inside(path): parameter for path, parameter in parameters.items()}
    return GgufCheckpoint(file, parameters)


def mtp_parameters(file: GgufFile, dense: bool = False) -> dict[str, Parameter]:
    """Path → parameter of the MTP head behind the last layer (llama.cpp's NextN); empty where the file has none. dense:
    its layer has no experts. ModelError as `open_checkpoint`."""
    architecture, layer = architecture_of(file), blocks(file)
    names = block_names(architecture.layers) | dict(architecture.more) | _NEXTN
    parameters: dict[str, Parameter] = {}
    for name, tensor in file.tensors.items():
        found = _IN_BLOCK.fullmatch(name)
        if found and int(found[1]) == layer and found[2] not in _COPIES:
            parameters |= _in_block(file, architecture, names, tensor, layer, found[2], found[3])
    if not parameters:
        return {}
    experts = {} if dense else expert_parameters(file, layer, architecture.layers.experts)
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


def _outside(of: Architecture, name: str) -> str | None:
    found = _OUTSIDE.fullmatch(name)
    if found and found[1] == "output":
        return f"lm_head.{found[2]}"
    return f"model.{_with_suffix(of.named(_TOP[found[1]]), found[2])}" if found and found[1] in _TOP else None


def _in_block(
    file: GgufFile,
    architecture: GgufArchitecture,
    names: Mapping[str, str],
    tensor: GgufTensor,
    layer: int,
    stem: str,
    suffix: str | None,
) -> dict[str, Parameter]:
    """Path → parameter of a tensor of a layer. names: tensors of a block → modules."""
    of = architecture.layers
    fused = (f"ffn_{part}{end}" for part in ("gate", "up") for end in architecture.fused)
    if _EXPERTS.fullmatch(stem) or stem in ("attn_k_b", "attn_v_b", *_CONVOLVED, *fused, *architecture.apart):
        return {}  # of several tensors each
    prefix = f"model.layers.{layer}"
    if architecture.parts is not None and (found := architecture.parts(file, stem, tensor)):
        block = of.named("mamba") if of.mamba else architecture.within
        return {f"{prefix}.{block}.{name}": rows for name, rows in found.items()}
    path = names.get(stem)
    if path is None:
        raise _unknown(file, f"blk.{layer}.{stem}" + (f".{suffix}" if suffix else ""))
    order = None if architecture.order is None else architecture.order(file, stem, tensor.shape[0])
    if architecture.turned and stem in _TURNED:
        heads = file.largest(_TURNED[stem])
        if tensor.shape[0] % (2 * heads):
            raise ModelError(f"{file.path} says that {stem} of {tensor.shape[0]} rows has {heads} heads; {AGAIN}")
        order = _turned_rows(tensor.shape[0], heads)
    full = _with_suffix(path, suffix)
    return {f"{prefix}.{full}": Rows(tensor, _shape(path, tensor), order, change=_change(of, full))}


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


def _change(of: Architecture, path: str) -> Change | None:
    if path.endswith("A_log"):
        return rates
    return _centred if of.centred_norm and path.endswith(_NORMS) else None


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


def _gate_up(file: GgufFile, architecture: GgufArchitecture, layer: int) -> dict[str, Parameter]:
    """The matrices of a layer's dense block and shared expert that are both gate and up; none of what is not there."""
    found: dict[str, Parameter] = {}
    for end, path in architecture.fused.items():
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
    return ModelError(
        f"{file.path} holds the tensor {name}, which no model of the architecture '{file.architecture}' that tiermoe "
        f"computes has; take the model's safetensors"
    )


@lru_cache(maxsize=8)
def _turned_rows(rows: int, heads: int) -> Tensor:
    """The two halves of each of so many heads take turns (`LlamaModel.permute`), so that llama.cpp's rotary embedding
    turns neighbours."""
    return torch.arange(rows).view(heads, -1, 2).swapaxes(1, 2).flatten()
