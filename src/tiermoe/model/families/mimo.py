"""MiMo-V2-Flash: grouped attention with narrow values, in most layers with a window, sinks and twice as many heads of
keys, and DeepSeek-V3's router."""

from __future__ import annotations

import itertools

import torch

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_checkpoint import Rows
from tiermoe.formats.gguf_file import AGAIN, GgufFile
from tiermoe.formats.gguf_header import GgufTensor
from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.families.deepseek_v3 import CORRECTION, v3_router
from tiermoe.model.families.family import Family, HeadFormat
from tiermoe.model.families.gguf import SINKS, Config, Gguf, block_names, common_fields, kv_heads, window_layers
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import moe_or_dense
from tiermoe.model.weights import Scope

_SLIDING, _FULL = "sliding_attention", "full_attention"
_HEAD = "model.mtp.layers.0."


class MimoV2Flash(Family):
    name, model_type = "MiMo-V2-Flash", "mimo_v2_flash"
    on_gpu = True
    gguf = Gguf(("mimo2",), block_names(correction=CORRECTION) | SINKS, within="self_attn")
    # The first of three heads: the others are made for its output at every position, and it drafts on its own. SGLang's
    # `mimo_v2_flash_nextn` says that its layer is dense and has a window.
    mtp_head = HeadFormat(
        {
            f"{_HEAD}final_layernorm.": "shared_head.norm.",
            f"{_HEAD}pre_mlp_layernorm.": "post_attention_layernorm.",
            _HEAD: "",
        },
        {"layer_types": "sliding_attention", "mlp_layer_types": "dense"},
    )

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        window, full = window_at(config, index), config.layer_types[index] == "full_attention"
        attention = grouped(
            w.at("self_attn"),
            config,
            index,
            kv_heads=config.num_key_value_heads * (1 if full else 2),
            value_columns=config.v_head_dim,
            window=window,
            sinks=bool(window),
            value_scale=float(config.attention_value_scale or 1),
        )
        return Layer(
            w.norm("input_layernorm"),
            attention,
            w.norm("post_attention_layernorm"),
            moe_or_dense(w.at("mlp"), config, v3_router(config), config.n_routed_experts, correction=CORRECTION),
        )

    def config(self, file: GgufFile) -> Config:
        config, kinds, dense = common_fields(file), window_layers(file), file.dense_layers
        rope, columns = config["rope_parameters"], file.count("attention.key_length", least=1)
        if rope["rope_type"] != "default":
            raise file.refusal("scales its rotary embedding, which no MiMo-V2-Flash does")
        rope["partial_rotary_factor"] = file.count("rope.dimension_count", least=1) / columns
        return {
            **config,
            "num_key_value_heads": _heads_of_keys(file, kinds),
            "head_dim": columns,
            "v_head_dim": file.count("attention.value_length", least=1),
            "attention_value_scale": file.decimal("attention.value_scale"),
            "rope_parameters": {_FULL: rope, _SLIDING: {**rope, "rope_theta": file.decimal("rope.freq_base_swa")}},
            # The file has the published number, of positions before the token's own (SGLang's `sliding_window_size`);
            # transformers counts that one too. llama.cpp attends to one position less.
            "sliding_window": file.count("attention.sliding_window", least=1) + 1,
            "layer_types": kinds,
            "n_routed_experts": file.experts,
            "moe_intermediate_size": file.expert_columns,
            "intermediate_size": file.dense_columns,
            "mlp_layer_types": ["dense" if layer in dense else "sparse" for layer in range(file.layers)],
            "routed_scaling_factor": file.decimal("expert_weights_scale", 1.0),
            "norm_topk_prob": True,  # models/mimo2.cpp
            "n_group": file.count("expert_group_count", 1),
            "topk_group": file.count("expert_group_used_count", 1),
        }

    def gguf_parts(self, file: GgufFile, stem: str, tensor: GgufTensor) -> dict[str, Rows]:
        """The matrices of queries, keys and values that one tensor holds, by their names in the block. ModelError for
        another number of rows than heads of the file's sizes have."""
        if stem != "attn_qkv" or len(tensor.shape) != 2:
            return {}
        keys, values = (file.count(f"attention.{part}_length", least=1) for part in ("key", "value"))
        (rows, columns), queries = tensor.shape, file.uniform_count("attention.head_count") * keys
        heads, rest = divmod(rows - queries, keys + values)
        if heads < 1 or rest:
            raise ModelError(
                f"{file.path}: {stem} has {rows} rows, which are not {queries} of queries and some heads of {keys} of "
                f"keys and {values} of values; {AGAIN}"
            )
        ends = [0, queries, queries + heads * keys, rows]
        return {
            f"{name}_proj.weight": Rows(tensor, (last - first, columns), torch.arange(first, last))
            for name, (first, last) in zip("qkv", itertools.pairwise(ends), strict=True)
        }


def _heads_of_keys(file: GgufFile, kinds: list[str]) -> int:
    """Of layers without a window. ModelError where those with one have not twice as many."""
    heads = kv_heads(file, kinds)
    full, sliding = (heads.get(kind, []) for kind in (_FULL, _SLIDING))
    if len(full) != 1 or not isinstance(full[0], int) or sliding not in ([], [2 * full[0]]):
        raise file.refusal(
            f"has {sliding} heads of keys in layers with a window and {full} in others, and MiMo-V2-Flash twice as "
            f"many as in others",
            f"take the model's safetensors, or {AGAIN}",
        )
    return full[0]
