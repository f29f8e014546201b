"""Tiny random models as GGUF files, written with the gguf package by the rules of llama.cpp's converter.

`write` returns the file and transformers' eager model, whose weights are what the gguf package dequantises of the
file's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from torch import Tensor

import gguf_blocks
import small_families
import tiny
from gguf_deepseek4 import ARCHITECTURE as DEEPSEEK4
from gguf_deepseek4 import name_of as deepseek4_name
from gguf_gemma4 import ARCHITECTURE as GEMMA4
from gguf_gemma4 import WHOLE as GEMMA4_WHOLE
from gguf_gemma4 import add_shares
from gguf_gemma4 import name_of as gemma4_name
from gguf_glm5_next import ARCHITECTURE as GLM5_NEXT
from gguf_glm5_next import name_of as glm5_name
from gguf_glm5_next import of_text
from gguf_granite_swa import ARCHITECTURE as GRANITE_SWA
from gguf_granite_swa import WHOLE as GRANITE_WHOLE
from gguf_granite_swa import name_of as granite_swa_name
from gguf_hunyuan3 import ARCHITECTURE as HUNYUAN3
from gguf_hunyuan3 import name_of as hunyuan3_name
from gguf_hy4 import ARCHITECTURE as HY4
from gguf_hy4 import name_of as hy4_name
from gguf_hy4 import rotated_views
from gguf_latent import DEEPSEEK_V32, GLM_LITE, latent_name
from gguf_linear import kimi_tensors, linear_tensors
from gguf_ling import ARCHITECTURE as LING
from gguf_ling import is_own as is_lings
from gguf_ling import ling_tensors
from gguf_ling import name_of as ling_name
from gguf_llama4 import add_factors
from gguf_mamba import NAMES as MAMBA
from gguf_mamba import mamba_tensors
from gguf_mellum import ARCHITECTURE as MELLUM
from gguf_mellum import name_of as mellum_name
from gguf_metadata import HYBRID, TURNED, add_metadata
from gguf_mimo2 import head_name, is_joined, joined
from gguf_minimax import ARCHITECTURE as MINIMAX_M3
from gguf_minimax import name_of as minimax_name
from gguf_phimoe import name_in_checkpoint as phimoe_name
from gguf_qwen4 import ARCHITECTURE as QWEN4
from gguf_qwen4 import changed, is_changed
from gguf_qwen4 import name_of as qwen4_name
from gguf_vocabulary import add_vocabulary
from tiermoe.formats.gguf_types import ENCODINGS
from tiermoe.model.hf.configs import Configs, text_config

BLOCKS = {**{each.type: each.columns for each in ENCODINGS}, "nvfp4": 64}


ARCHITECTURES: dict[str, gguf.MODEL_ARCH | str] = {
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek": gguf.MODEL_ARCH.DEEPSEEK,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v4": DEEPSEEK4,
    "hy_v4": HY4,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen4_exp_text": QWEN4,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "glm4_moe_lite": GLM_LITE,
    "glm_moe_dsa": gguf.MODEL_ARCH.GLM_DSA,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "minimax_m3_vl_text": MINIMAX_M3,
    "mistral4": gguf.MODEL_ARCH.MISTRAL4,
    "mimo_v2_flash": gguf.MODEL_ARCH.MIMO2,
    "kimi_linear": gguf.MODEL_ARCH.KIMI_LINEAR,
    "bailing_hybrid": LING,
    "glm5_next_text": GLM5_NEXT,
    "dots1": gguf.MODEL_ARCH.DOTS1,
    "phimoe": gguf.MODEL_ARCH.PHIMOE,
    "exaone_moe": gguf.MODEL_ARCH.EXAONE_MOE,
    "afmoe": gguf.MODEL_ARCH.AFMOE,
    "hunyuan_v1_moe": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "hy_v3": HUNYUAN3,
    "mellum": MELLUM,
    "gemma4_text": GEMMA4,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "llama4_text": gguf.MODEL_ARCH.LLAMA4,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "granitemoeshared": gguf.MODEL_ARCH.GRANITE_MOE,
    "granitemoe_swa": GRANITE_SWA,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H_MOE,
    "jamba": gguf.MODEL_ARCH.JAMBA,
}


def called(family: str) -> str:
    """The architecture of a family's files."""
    arch = ARCHITECTURES[family]
    return arch if isinstance(arch, str) else gguf.MODEL_ARCH_NAMES[arch]


NAMED = {
    **dict.fromkeys(("deepseek_v32", "glm4_moe_lite"), latent_name),
    "deepseek_v4": deepseek4_name, "hy_v4": hy4_name, "minimax_m3_vl_text": minimax_name,
    "granitemoe_swa": granite_swa_name, "qwen4_exp_text": qwen4_name, "hy_v3": hunyuan3_name, "mellum": mellum_name,
    "gemma4_text": gemma4_name, "bailing_hybrid": ling_name, "glm5_next_text": glm5_name,
}  # fmt: skip
"""Families that the gguf package does not have → parameter → its name in the file."""


WHOLE = {"granitemoe_swa": GRANITE_WHOLE, "gemma4_text": GEMMA4_WHOLE}
"""Families → ends of parameters that are one tensor of the file, and of other families' files several or none."""


CENTRED = ("qwen3_next", "qwen3_5_moe_text", "qwen4_exp_text", "minimax_m3_vl_text")
"""Families whose norms are written as weight + 1."""


GROWING = ("bailing_hybrid",)
"""Families whose rates of decays are written as exp(A_log), and not as its negative."""


WITHOUT_FACTORS = ("token_embd", "attn_v", "blk.1.ffn_down_exps")
"""Tensors that have no factors in NVFP4, as llama-quantize writes them."""
_WRITABLE = {"f32", "f16", "i32", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4"}
"""Types that the gguf package quantises to."""


_CORRECTIONS = ("e_score_correction_bias", "expert_bias")
_HELD = (*_CORRECTIONS, "tid2eid", "layer_scalar")
"""Ends of the buffers that a file holds."""


Views = Iterator[tuple[str, tuple[Tensor, ...], tuple[int, ...]]]


Kinds = Callable[[str], str]


def kinds(experts: str, down: str | None = None, dense: str | None = None) -> Kinds:
    """A type for matrices by their name: of experts, of experts' second matrix, of all others."""

    def kind(name: str) -> str:
        if "ffn_down_exps" in name:
            return down or experts
        return experts if "_exps" in name else dense or experts

    return kind


def model_of(family: str, **changes: Any) -> Any:
    """transformers' eager model with random weights in float32, as `tiny.write` makes them."""
    torch.manual_seed(0)
    config_of = tiny.config_of if family in tiny.CONFIGS else small_families.config_of
    config = config_of(family, **{**FIXED.get(family, {}), **changes})
    model = tiny.auto_class(family).from_config(config, dtype=torch.float32, experts_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(_CORRECTIONS):
                torch.nn.init.normal_(buffer, std=0.05)
            elif name.endswith("layer_scalar"):
                torch.nn.init.uniform_(buffer, 0.5, 1.5)
            elif name.endswith(_HELD):
                buffer.copy_(torch.stack([torch.randperm(8)[: buffer.shape[1]] for _ in range(len(buffer))]))
    return model


FIXED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True, "mlp_only_layers": []},
    "qwen2_moe": {"mlp_only_layers": []},
    "gpt_oss": {"sliding_window": 32},
    "dots1": {"sliding_window": None},
    "afmoe": {"num_hidden_layers": 4, "layer_types": None},
    "qwen3_next": {"mlp_only_layers": []},
    "minimax_m3_vl_text": {"swiglu_limit": 7.0},
    "qwen4_exp_text": {
        "output_gate_type": "sigmoid", "hc_lowrank": 32, "ple_layer_ids": [1], "ple_embed_dim": 128,
        "linear_value_head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
    "llama4_text": {
        "num_hidden_layers": 4, "interleave_moe_layer_step": 2, "moe_layers": None, "no_rope_layers": None,
        "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1,
    },
}  # fmt: skip
"""What llama.cpp takes for granted of a family."""


def write(
    out: Path, model: Any, family: str, kind: Kinds, shards: int = 0, vocabulary: Path | None = None, **entries: Any
) -> Path:
    """Writes `model` as GGUF and puts what the file stands for into its weights. entries: replace the writer's own;
    None leaves one out."""
    arch = ARCHITECTURES[family]
    config = dict(Configs(model.config, text_config(model.config), False).plain().fields)
    writer = gguf.GGUFWriter(out, called(family), split_max_tensors=shards)
    add_metadata(writer, family, config)
    if vocabulary is not None:
        add_vocabulary(writer, vocabulary, config["vocab_size"])
    for key, value in entries.items():
        name = key.replace("__", ".")
        fields = next(each for each in writer.kv_data if name in each or each)
        fields.pop(name, None)
        if value is not None:
            fields[name] = value
    with torch.no_grad():
        for name, views, shape in _tensors(model, family, arch):
            _add(writer, name, views, shape, _kind_of(name, shape, kind), family)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":  # behind matrices, where llama-quantize puts it
        add_factors(writer, rope, config["head_dim"])
    if family == "gemma4_text":
        add_shares(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


_WIDE = (
    "ffn_gate_inp", "sinks", "conv1d", "ssm_norm", "shortconv.conv", "_fn.", "_ape", "indexer.q", "indexer.k",
)  # fmt: skip
_PLAIN = {"f32": "f4", "f16": "f2", "i32": "i4"}
"""Types of numbers that are values of their own → numpy's."""


def _kind_of(name: str, shape: tuple[int, ...], kind: Kinds) -> str:
    """Norms, routers, biases and sinks are float32; rows that are no whole blocks are float16."""
    if "tid2eid" in name:
        return "i32"
    if len(shape) == 1 or not name.endswith(".weight") or any(each in name for each in _WIDE):
        return "f32"
    chosen = kind(name)
    return chosen if shape[-1] % BLOCKS.get(chosen, 1) == 0 else "f16"


def _add(
    writer: gguf.GGUFWriter, name: str, views: tuple[Tensor, ...], shape: tuple[int, ...], kind: str, family: str
) -> None:
    values = torch.cat([view.flatten() for view in views])
    centred = int(family in CENTRED and "norm" in name and "ssm_norm" not in name)
    sign = 1 if family in GROWING else -1
    if name.endswith("ssm_a"):
        values = sign * values.exp()
    values = (values + centred).view(shape).numpy()
    type = Kind[kind.upper()]
    if kind in _WRITABLE:
        raw = values.astype(_PLAIN[kind]) if kind in _PLAIN else quantize(values, type)
        wide = raw.astype(np.float32) if kind in _PLAIN else dequantize(raw, type)
    else:
        rows, columns = int(np.prod(shape[:-1])), shape[-1]
        blocks = gguf_blocks.random_blocks(kind, rows, columns, seed=len(name))["blocks"].numpy()
        wide = dequantize(blocks, type) * np.float32(1)
        raw = blocks.reshape(*shape[:-1], -1)
    if kind in _PLAIN:
        writer.add_tensor(name, raw)
    else:
        writer.add_tensor(name, raw, raw_dtype=type)
    if kind == "nvfp4" and not any(each in name for each in WITHOUT_FACTORS):
        entries = shape[0] if len(shape) == 3 else 1
        factors = np.linspace(0.5, 2, entries, dtype=np.float32)
        writer.add_tensor(name.replace("weight", "scale"), factors)
        writer.add_tensor(name.replace("weight", "input_scale"), np.ones(entries, dtype=np.float32))
        wide = wide.reshape(shape) * factors.reshape(-1, *[1] * (len(shape) - 1))
    found = torch.from_numpy(np.ascontiguousarray(wide)).flatten()
    found = (sign * found).log() if name.endswith("ssm_a") else found - centred
    for view, part in zip(views, found.split([view.numel() for view in views]), strict=True):
        view.copy_(part.view(view.shape))


def _tensors(model: Any, family: str, arch: gguf.MODEL_ARCH | str) -> Views:
    """(name in the file, views of the model's parameter with its values in the file's order, shape in the file)."""
    config = model.config.get_text_config()
    names = None if isinstance(arch, str) else gguf.get_tensor_name_map(arch, config.num_hidden_layers)

    def name_of(path: str) -> str:
        if names is None:
            return NAMED[family](path)
        if ".mixer." in path:
            path = path.replace("model.", "backbone.")
        own = head_name(path) if family == "mimo_v2_flash" else None
        found = own or names.get_name(path, (".weight", ".bias"))
        assert found is not None, path
        return str(found)

    state = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n.endswith(_HELD)}}
    if family == "glm5_next_text":
        state = of_text(state)
    for path, parameter in state.items():
        value = parameter.data
        stem, _, last = path.rpartition(".")
        if family == "bailing_hybrid" and is_lings(path):
            yield from ling_tensors(path, value, config, name_of)
        elif ".forget_gate." in path or path.endswith("self_attn.conv1d.weight"):
            yield from kimi_tensors(path, value, name_of)
        elif ".linear_attn." in path:
            layer, _, name = path.partition(".linear_attn.")
            yield from linear_tensors(f"blk.{layer.rpartition('.')[2]}", name, value, config, family)
        elif family in HYBRID and (name := path.partition(".mamba." if ".mamba." in path else ".mixer.")[2]) in MAMBA:
            groups = config.n_groups if family == "nemotron_h" else getattr(config, "mamba_n_groups", None)
            yield from mamba_tensors(f"blk.{path.split('.')[2]}", name, value, groups)
        elif family == "qwen4_exp_text" and is_changed(path):
            yield from changed(path, value, config)
        elif family == "mimo_v2_flash" and is_joined(path, config):
            yield from joined(path, state)
        elif path.endswith(tuple(WHOLE.get(family, ()))):
            yield name_of(path), (value,), tuple(value.shape)
        elif path.endswith("shared_mlp.input_linear.weight"):
            block = f"blk.{path.split('.')[2]}"
            for part, half in zip(("gate", "up"), value.chunk(2), strict=True):
                yield f"{block}.ffn_{part}_shexp.weight", (half,), tuple(half.shape)
        elif path.endswith("gate_up_proj.weight"):
            for part, half in zip(("gate", "up"), value.chunk(2), strict=True):
                yield name_of(path.replace("gate_up", part)), (half,), tuple(half.shape)
        elif ".experts." in path:
            yield from _experts(stem, last, value, family, name_of)
        elif path.endswith("kv_b_proj.weight"):
            heads, keys = config.num_attention_heads, config.qk_nope_head_dim
            each = value.view(heads, -1, value.shape[-1])
            to_keys, to_values = each[:, :keys].transpose(1, 2), each[:, keys:]
            yield name_of(path.replace("kv_b_proj", "k_b_proj")), (to_keys,), tuple(to_keys.shape)
            yield name_of(path.replace("kv_b_proj", "v_b_proj")), (to_values,), tuple(to_values.shape)
        elif family in TURNED and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            turned = value.view(heads, 2, value.shape[0] // heads // 2, *value.shape[1:]).swapaxes(1, 2)
            yield name_of(path), (turned,), tuple(value.shape)
        else:
            squeezed = value.squeeze(1) if path.endswith("conv.conv.weight") else value
            if family == "qwen2_moe" and path.endswith("shared_expert_gate.weight"):
                squeezed = value[0]  # llama.cpp's quantiser drops a dimension that its converter leaves
            called, views = _other(path, value, family, name_of)
            views = rotated_views(path, value, config) if family == "hy_v4" else views
            yield called, views, tuple(squeezed.shape)


def _other(path: str, value: Tensor, family: str, name_of: Callable[[str], str]) -> tuple[str, tuple[Tensor, ...]]:
    """The name in the file of a parameter that is there as it is."""
    if path.endswith("sinks"):
        path = f"{path}.weight"
    elif path.endswith("e_score_correction_bias"):
        path = path.replace("_correction_bias", "_correction.bias").replace("gate.moe_statics", "moe_statics")
    elif path.endswith("expert_bias"):
        path = f"{path}.bias"
    elif family == "mixtral" and path.endswith("mlp.gate.weight"):
        path = path.replace("mlp", "block_sparse_moe")
    elif family == "phimoe":
        path = phimoe_name(path)
    elif path.endswith("router.weight") and family.startswith("granitemoe"):
        path = path.replace("router", "router.layer")
    return name_of(path), (value,)


def _experts(stem: str, last: str, value: Tensor, family: str, name_of: Callable[[str], str]) -> Views:
    matrix, _, bias = last.partition("_proj")
    suffix = "bias" if bias else "weight"
    if family in ("gpt_oss", "llama4_text") and not bias:
        value = value.transpose(1, 2)
    if matrix == "down":
        halves = {"down": value}
    elif family == "gpt_oss":
        halves = {"gate": value[:, 0::2], "up": value[:, 1::2]}
    elif matrix == "up":
        halves = {"up": value}
    else:
        rows = value.shape[1] // 2
        halves = {"gate": value[:, :rows], "up": value[:, rows:]}
    called = {"gate": "w1", "up": "w3", "down": "w2"}
    for each, half in halves.items():
        path = (
            f"{stem}.{each}_proj.{suffix}".replace("block_sparse_moe", "mlp")
            .replace("mixer", "mlp")
            .replace("feed_forward.experts", "mlp.experts")
        )
        if family in ("mixtral", "lfm2_moe", "phimoe"):  # LlamaModel.modify_tensors
            path = stem.removeprefix("model.").replace("mlp", "feed_forward") + f".{called[each]}.{suffix}"
        yield name_of(path), (half,), tuple(half.shape)
