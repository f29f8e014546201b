"""MiMo-V2-Flash in GGUF files (`MimoV2Model` of the converter): its config, and queries, keys and values in one
tensor."""

from __future__ import annotations

import itertools

import torch

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_checkpoint import Rows
from tiermoe.formats.gguf_file import GgufFile, GgufTensor
from tiermoe.model.gguf.config import Config, common, window_layers
from tiermoe.model.gguf.shapes import AGAIN, blocks, dense_inner, dense_layers, experts, inner

_SLIDING, _FULL = "sliding_attention", "full_attention"


def mimo2(file: GgufFile) -> Config:
    config, kinds, dense = common(file), window_layers(file), dense_layers(file)
    rope, columns = config["rope_parameters"], file.count("attention.key_length", least=1)
    if rope["rope_type"] != "default":
        raise ModelError(f"{file.path} scales its rotary embedding, which no MiMo-V2-Flash does; {AGAIN}")
    rope["partial_rotary_factor"] = file.count("rope.dimension_count", least=1) / columns
    return {
        **config,
        "model_type": "mimo_v2_flash",
        "num_key_value_heads": _kv_heads(file, kinds),
        "head_dim": columns,
        "v_head_dim": file.count("attention.value_length", least=1),
        "attention_value_scale": file.decimal("attention.value_scale"),
        "rope_parameters": {_FULL: rope, _SLIDING: {**rope, "rope_theta": file.decimal("rope.freq_base_swa")}},
        # The file has the published number, of positions before the token's own (SGLang's `sliding_window_size`);
        # transformers counts that one too. llama.cpp attends to one position less.
        "sliding_window": file.count("attention.sliding_window", least=1) + 1,
        "layer_types": kinds,
        "n_routed_experts": experts(file),
        "moe_intermediate_size": inner(file),
        "intermediate_size": dense_inner(file),
        "mlp_layer_types": ["dense" if layer in dense else "sparse" for layer in range(blocks(file))],
        "routed_scaling_factor": file.decimal("expert_weights_scale", 1.0),
        "norm_topk_prob": True,  # models/mimo2.cpp
        "n_group": file.count("expert_group_count", 1),
        "topk_group": file.count("expert_group_used_count", 1),
    }


def _kv_heads(file: GgufFile, kinds: list[str]) -> int:
    """Of layers without a window. ModelError where those with one have not twice as many."""
    found = file.of_model("attention.head_count_kv")
    each = found if isinstance(found, list) else [found] * len(kinds)
    counts = {kind: {count for count, own in zip(each, kinds, strict=False) if own == kind} for kind in set(kinds)}
    full, sliding = (sorted(counts.get(kind, ()), key=str) for kind in (_FULL, _SLIDING))
    if len(each) < len(kinds) or len(full) != 1 or not isinstance(full[0], int) or sliding not in ([], [2 * full[0]]):
        raise ModelError(
            f"{file.path} has {sliding} heads of keys in layers with a window and {full} in others, and MiMo-V2-Flash "
            f"twice as many as in others; take the model's safetensors, or download it again"
        )
    return full[0]


def qkv_parts(file: GgufFile, stem: str, tensor: GgufTensor) -> dict[str, Rows]:
    """The matrices of queries, keys and values, by their names in the block, where a tensor holds all three. ModelError
    where it has not as many rows as heads of the file's sizes do."""
    if stem != "attn_qkv" or len(tensor.shape) != 2:
        return {}
    keys, values = (file.count(f"attention.{part}_length", least=1) for part in ("key", "value"))
    (rows, columns), queries = tensor.shape, file.uniform_count("attention.head_count") * keys
    heads, rest = divmod(rows - queries, keys + values)
    if heads < 1 or rest:
        raise ModelError(
            f"{file.path}: {stem} has {rows} rows, which are not {queries} of queries and some heads of {keys} of keys "
            f"and {values} of values; {AGAIN}"
        )
    ends = [0, queries, queries + heads * keys, rows]
    return {
        f"{name}_proj.weight": Rows(tensor, (last - first, columns), torch.arange(first, last))
        for name, (first, last) in zip("qkv", itertools.pairwise(ends), strict=True)
    }
