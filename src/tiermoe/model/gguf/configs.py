"""The config of transformers that a GGUF file describes, a function an architecture of llama.cpp. Sizes come from the
tensors' shapes where these tell them."""

from __future__ import annotations

from typing import Any

from tiermoe.errors import ModelError
from tiermoe.model.gguf.ends import end_ids, token_id
from tiermoe.model.gguf.linear_attention import linear_config
from tiermoe.model.gguf.rope import rope_parameters
from tiermoe.model.gguf.shapes import (
    blocks,
    dense_inner,
    dense_layers,
    experts,
    in_first_block,
    inner,
    leading_dense,
    shape,
)
from tiermoe.store.gguf.file import GgufFile
from tiermoe.store.gguf.values import count, decimal, whole

Config = dict[str, Any]

_SOFTMAX, _SIGMOID = 1, 2
"""`expert_gating_func`."""


def _common(file: GgufFile) -> Config:
    return {
        "vocab_size": shape(file, "token_embd.weight", 2)[0],
        "hidden_size": count(file, "embedding_length"),
        "num_hidden_layers": blocks(file),
        "num_attention_heads": whole(file, "attention.head_count"),
        "max_position_embeddings": count(file, "context_length"),
        "rms_norm_eps": decimal(file, "attention.layer_norm_rms_epsilon"),
        "num_experts_per_tok": count(file, "expert_used_count"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": rope_parameters(file),
        "bos_token_id": token_id(file, "bos"),
        "eos_token_id": end_ids(file) or None,
        "pad_token_id": token_id(file, "padding"),
    }


def _grouped(file: GgufFile) -> Config:
    """A model with grouped-query attention."""
    heads = whole(file, "attention.head_count")
    return {
        **_common(file),
        "num_key_value_heads": whole(file, "attention.head_count_kv", heads),
        "head_dim": count(file, "attention.key_length", count(file, "embedding_length") // heads, least=1),
    }


def qwen3moe(file: GgufFile) -> Config:
    return {
        **_grouped(file),
        "model_type": "qwen3_moe",
        "num_experts": experts(file),
        "moe_intermediate_size": inner(file),
        "intermediate_size": dense_inner(file),
        "mlp_only_layers": dense_layers(file),
        "norm_topk_prob": True,  # models/qwen3moe.cpp
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def qwen2moe(file: GgufFile) -> Config:
    return {
        **_grouped(file),
        "model_type": "qwen2_moe",
        "num_experts": experts(file),
        "moe_intermediate_size": inner(file),
        "shared_expert_intermediate_size": in_first_block(file, "ffn_gate_shexp.weight", 2)[0],
        "intermediate_size": dense_inner(file),
        "mlp_only_layers": dense_layers(file),
        "norm_topk_prob": False,  # models/qwen2moe.cpp
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def mixtral(file: GgufFile) -> Config:
    return {
        **_grouped(file),
        "model_type": "mixtral",
        "num_local_experts": experts(file),
        "intermediate_size": inner(file),
        "sliding_window": None,
    }


def olmoe(file: GgufFile) -> Config:
    return {
        **_grouped(file),
        "model_type": "olmoe",
        "num_experts": experts(file),
        "intermediate_size": inner(file),
        "clip_qkv": decimal(file, "attention.clamp_kqv", None),
        "norm_topk_prob": False,  # models/olmoe.cpp
    }


def gpt_oss(file: GgufFile) -> Config:
    config = _grouped(file)
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False  # as OpenAI's configs say
    layers = range(config["num_hidden_layers"])
    return {
        **config,
        "model_type": "gpt_oss",
        "num_local_experts": experts(file),
        "intermediate_size": inner(file),
        "sliding_window": count(file, "attention.sliding_window"),
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in layers],
    }


def deepseek2(file: GgufFile) -> Config:
    rotary = count(file, "rope.dimension_count")
    key = count(file, "attention.key_length_mla", count(file, "attention.key_length"))
    corrected = any(name.endswith("exp_probs_b.bias") for name in file.tensors)  # no DeepSeek-V2 is
    sigmoid = count(file, "expert_gating_func", _SIGMOID if corrected else _SOFTMAX) == _SIGMOID
    groups, kept = count(file, "expert_group_count", 1), count(file, "expert_group_used_count", 1)
    shared = count(file, "expert_shared_count")
    heads = whole(file, "attention.head_count")
    config = {
        **_common(file),
        "num_key_value_heads": heads,
        "q_lora_rank": count(file, "attention.q_lora_rank", 0) or None,
        "kv_lora_rank": count(file, "attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": count(file, "attention.value_length_mla", count(file, "attention.value_length")),
        "n_routed_experts": experts(file),
        "n_shared_experts": shared,
        "moe_intermediate_size": inner(file),
        "intermediate_size": dense_inner(file),
        "first_k_dense_replace": leading_dense(file),
        "routed_scaling_factor": decimal(file, "expert_weights_scale", 1.0),
        "norm_topk_prob": bool(file.of_model("expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": kept,
    }
    if sigmoid:
        return {**config, "model_type": "deepseek_v3"}
    if config["norm_topk_prob"]:
        raise ModelError(f"{file.path} scales a softmax router's weights to a fixed sum, which no DeepSeek-V2 does")
    return {
        **config,
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }


def qwen35moe(file: GgufFile) -> Config:
    """Of Qwen3.5, and of Qwen3-Next where all layers have experts."""
    if dense := dense_layers(file):
        raise ModelError(
            f"{file.path} has layers without experts ({', '.join(map(str, dense))}), which no Qwen3-Next or Qwen3.5 "
            f"that was published has; take the model's safetensors"
        )
    return {
        **_partly_turned(file),
        **linear_config(file),
        "model_type": "qwen3_5_moe_text",
        "num_experts": experts(file),
        "moe_intermediate_size": inner(file),
        "shared_expert_intermediate_size": in_first_block(file, "ffn_gate_shexp.weight", 2)[0],
    }


def glm4moe(file: GgufFile) -> Config:
    return {
        **_partly_turned(file),
        "model_type": "glm4_moe",
        "n_routed_experts": experts(file),
        "n_shared_experts": count(file, "expert_shared_count"),
        "moe_intermediate_size": inner(file),
        "intermediate_size": dense_inner(file),
        "first_k_dense_replace": leading_dense(file),
        "routed_scaling_factor": decimal(file, "expert_weights_scale", 1.0),
        "norm_topk_prob": bool(file.of_model("expert_weights_norm", False)),
        "n_group": count(file, "expert_group_count", 1),
        "topk_group": count(file, "expert_group_used_count", 1),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def lfm2moe(file: GgufFile) -> Config:
    convolution = [f"blk.{layer}.shortconv.conv.weight" in file.tensors for layer in range(blocks(file))]
    first = leading_dense(file)
    config = _common(file)
    return {
        **config,
        "model_type": "lfm2_moe",
        "num_key_value_heads": _most(file, "attention.head_count_kv"),  # convolutions have none
        "norm_eps": config["rms_norm_eps"],
        "layer_types": ["conv" if each else "full_attention" for each in convolution],
        "conv_L_cache": count(file, "shortconv.l_cache"),
        "num_dense_layers": first,
        "num_experts": experts(file),
        "moe_intermediate_size": inner(file),
        "intermediate_size": dense_inner(file),
        "use_expert_bias": f"blk.{first}.exp_probs_b.bias" in file.tensors,
        "norm_topk_prob": True,  # models/lfm2moe.cpp
    }


def _most(file: GgufFile, key: str) -> int:
    """The largest of an entry's values for each layer."""
    value = file.of_model(key)
    return max(value, default=0) if isinstance(value, list) else count(file, key)


def minimaxm2(file: GgufFile) -> Config:
    return {
        **_partly_turned(file),
        "model_type": "minimax_m2",
        "num_local_experts": experts(file),
        "intermediate_size": inner(file),
    }


def ernie45moe(file: GgufFile) -> Config:
    first = leading_dense(file)
    return {
        **_grouped(file),
        "model_type": "ernie4_5_moe",
        "moe_num_experts": experts(file),
        "moe_num_shared_experts": count(file, "expert_shared_count", 0),
        "moe_intermediate_size": inner(file),
        "intermediate_size": dense_inner(file),
        "moe_layer_start_index": first,
        "moe_layer_end_index": blocks(file) - 1,
        "moe_layer_interval": 1,
    }


def _partly_turned(file: GgufFile) -> Config:
    """A model of which some columns of each head are turned by their position."""
    config = _grouped(file)
    share = count(file, "rope.dimension_count", config["head_dim"]) / config["head_dim"]
    config["rope_parameters"]["partial_rotary_factor"] = share
    return config
