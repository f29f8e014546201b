"""Gemma 4 with experts in GGUF files (`Gemma4Model` of the converter): its config, and what its tensors are called."""

from __future__ import annotations

from typing import Any

import torch

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.gguf.config import Config, common, window_layers
from tiermoe.model.gguf.frequencies import FREQUENCIES, divisors
from tiermoe.model.gguf.shapes import AGAIN, dense_layers, experts, inner, shape

NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "layer_output_scale": "layer_scalar",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
"""Tensors of a block → modules or parameters of a layer, beside the usual ones."""
_SLIDING, _FULL = "sliding_attention", "full_attention"
_UNTURNED = 1e30
"""What the frequencies of columns that are not rotated are divided by (`generate_extra_tensors`)."""
_ABSENT = {
    "embedding_length_per_layer_input": "embeddings of each layer",
    "attention.shared_kv_layers": "layers that share keys and values",
}
"""Entry → what Gemma 4 with experts has not, where it is not 0."""


def gemma4(file: GgufFile) -> Config:
    """ModelError for a file of a model that none with experts is like."""
    for key, part in _ABSENT.items():
        if file.count(key, 0):
            raise ModelError(f"{file.path} has {part}, which no Gemma 4 with experts has; take the model's safetensors")
    if dense := dense_layers(file):
        raise ModelError(
            f"{file.path} has layers without experts ({', '.join(map(str, dense))}), which no Gemma 4 with experts "
            f"has; {AGAIN}"
        )
    config, kinds = common(file), window_layers(file)
    if _FULL not in kinds:
        raise ModelError(f"{file.path} has no layer without a window, which every Gemma 4 has; {AGAIN}")
    columns = file.count("attention.key_length", least=1)
    heads = _kv_heads(file, kinds)
    return {
        **config,
        "model_type": "gemma4_text",
        "enable_moe_block": True,
        "num_experts": experts(file),
        "top_k_experts": config["num_experts_per_tok"],
        "moe_intermediate_size": inner(file),
        "intermediate_size": shape(file, "blk.0.ffn_down.weight", 2)[1],
        "layer_types": kinds,
        "sliding_window": file.count("attention.sliding_window", least=1),
        "head_dim": file.count("attention.key_length_swa", least=1),
        "global_head_dim": columns,
        "num_key_value_heads": heads.get(_SLIDING, heads[_FULL]),
        "num_global_key_value_heads": heads[_FULL],
        "attention_k_eq_v": f"blk.{kinds.index(_FULL)}.attn_v.weight" not in file.tensors,
        "rope_parameters": _rope(file, config["rope_parameters"], columns),
        "final_logit_softcapping": file.decimal("final_logit_softcapping", None),
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    }


def _kv_heads(file: GgufFile, kinds: list[str]) -> dict[str, int]:
    """Kind of layers → heads of keys. ModelError where layers of a kind differ."""
    found = file.of_model("attention.head_count_kv")
    each = found if isinstance(found, list) else [found] * len(kinds)
    counts = {kind: {count for count, own in zip(each, kinds, strict=False) if own == kind} for kind in set(kinds)}
    only = {kind: next(iter(own)) for kind, own in counts.items() if len(own) == 1}
    if len(each) < len(kinds) or only.keys() != counts.keys() or any(not isinstance(n, int) for n in only.values()):
        raise ModelError(f"{file.path} does not say how many heads of keys layers of a kind have ({found}); {AGAIN}")
    return only


def _rope(file: GgufFile, rope: dict[str, Any], columns: int) -> dict[str, dict[str, Any]]:
    """Of layers with a window the default embedding; of others the share of a head's columns that is rotated."""
    factors = divisors(file, FREQUENCIES, columns)
    if factors is None:
        raise ModelError(f"{file.path} has no tensor {FREQUENCIES}; convert the model again with a current llama.cpp")
    turned = int((factors == 1).sum())
    expected = torch.where(torch.arange(len(factors)) < turned, 1.0, torch.tensor(_UNTURNED))
    if not turned or not torch.equal(factors, expected):
        raise ModelError(
            f"{file.path} divides the frequencies of its rotary embedding by {factors.min():g} to {factors.max():g}, "
            f"and Gemma 4 the first by 1 and all others by {_UNTURNED:g}; {AGAIN}"
        )
    whole = file.count("attention.key_length_swa"), columns
    if rope["rope_type"] != "default" or any(
        file.count(key, size) != size
        for key, size in zip(("rope.dimension_count_swa", "rope.dimension_count"), whole, strict=True)
    ):
        raise ModelError(f"{file.path} scales its rotary embedding, or rotates parts of heads, and no Gemma 4 does")
    share = {"rope_type": "proportional", "partial_rotary_factor": turned / len(factors)}
    return {
        _FULL: {**share, "rope_theta": rope["rope_theta"]},
        _SLIDING: {"rope_type": "default", "rope_theta": file.decimal("rope.freq_base_swa")},
    }
