"""llama.cpp's architectures of MoE models: one entry each.

An entry says which family of transformers a file of it is, what its config says, and what its tensors are called in
transformers' model. Sizes come from the tensors' shapes where these tell them. The converter is llama.cpp's
`conversion/`, a class an architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tiermoe.errors import ModelError
from tiermoe.model.gguf.ends import end_ids, token_id
from tiermoe.model.gguf.rope import rope_parameters
from tiermoe.store.gguf.file import GgufFile
from tiermoe.store.gguf.values import decimal, whole

Config = dict[str, Any]

_SOFTMAX, _SIGMOID = 1, 2
"""`expert_gating_func`."""

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Tensors outside of blocks."""

BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Tensors of a block, in every architecture."""


def _shared(name: str) -> dict[str, str]:
    return {f"ffn_{matrix}_shexp": f"mlp.{name}.{matrix}_proj" for matrix in ("gate", "up", "down")}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """config: the fields of transformers' config for a file. more: names of a block's tensors, beside `BLOCK`. turned:
    the halves of each head's queries and keys take turns (`store.gguf.parameter.Rows`)."""

    config: Callable[[GgufFile], Config]
    more: Mapping[str, str]
    turned: bool = False


def _common(file: GgufFile) -> Config:
    return {
        "vocab_size": _shape(file, "token_embd.weight")[0],
        "hidden_size": file.needed("embedding_length"),
        "num_hidden_layers": blocks(file),
        "num_attention_heads": whole(file, "attention.head_count"),
        "max_position_embeddings": file.needed("context_length"),
        "rms_norm_eps": decimal(file.needed("attention.layer_norm_rms_epsilon")),
        "num_experts_per_tok": file.needed("expert_used_count"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": rope_parameters(file),
        "bos_token_id": token_id(file, "bos"),
        "eos_token_id": end_ids(file) or None,
        "pad_token_id": token_id(file, "padding"),
    }


def blocks(file: GgufFile) -> int:
    """Layers, without those that predict several tokens."""
    return int(file.needed("block_count")) - int(file.of_model("nextn_predict_layers", 0))


def _grouped(file: GgufFile) -> Config:
    """A model with grouped-query attention."""
    heads = whole(file, "attention.head_count")
    return {
        **_common(file),
        "num_key_value_heads": whole(file, "attention.head_count_kv", heads),
        "head_dim": file.of_model("attention.key_length", file.needed("embedding_length") // heads),
    }


def _qwen3moe(file: GgufFile) -> Config:
    return {
        **_grouped(file),
        "model_type": "qwen3_moe",
        "num_experts": experts(file),
        "moe_intermediate_size": _inner(file),
        "intermediate_size": _dense_inner(file),
        "mlp_only_layers": dense_layers(file),
        "norm_topk_prob": True,  # models/qwen3moe.cpp
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _qwen2moe(file: GgufFile) -> Config:
    return {
        **_grouped(file),
        "model_type": "qwen2_moe",
        "num_experts": experts(file),
        "moe_intermediate_size": _inner(file),
        "shared_expert_intermediate_size": _in_first_block(file, "ffn_gate_shexp.weight")[0],
        "intermediate_size": _dense_inner(file),
        "mlp_only_layers": dense_layers(file),
        "norm_topk_prob": False,  # models/qwen2moe.cpp
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _mixtral(file: GgufFile) -> Config:
    return {
        **_grouped(file),
        "model_type": "mixtral",
        "num_local_experts": experts(file),
        "intermediate_size": _inner(file),
        "sliding_window": None,
    }


def _olmoe(file: GgufFile) -> Config:
    return {
        **_grouped(file),
        "model_type": "olmoe",
        "num_experts": experts(file),
        "intermediate_size": _inner(file),
        "clip_qkv": file.of_model("attention.clamp_kqv"),
        "norm_topk_prob": False,  # models/olmoe.cpp
    }


def _gpt_oss(file: GgufFile) -> Config:
    config = _grouped(file)
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False  # as OpenAI's configs say
    layers = range(config["num_hidden_layers"])
    return {
        **config,
        "model_type": "gpt_oss",
        "num_local_experts": experts(file),
        "intermediate_size": _inner(file),
        "sliding_window": file.needed("attention.sliding_window"),
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in layers],
    }


def _deepseek2(file: GgufFile) -> Config:
    rotary = int(file.needed("rope.dimension_count"))
    key = file.of_model("attention.key_length_mla", file.needed("attention.key_length"))
    sigmoid = file.of_model("expert_gating_func", _SOFTMAX) == _SIGMOID
    groups, kept = file.of_model("expert_group_count", 1), file.of_model("expert_group_used_count", 1)
    shared = int(file.needed("expert_shared_count"))
    heads = whole(file, "attention.head_count")
    config = {
        **_common(file),
        "num_key_value_heads": heads,
        "q_lora_rank": file.of_model("attention.q_lora_rank") or None,
        "kv_lora_rank": file.needed("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": file.of_model("attention.value_length_mla", file.needed("attention.value_length")),
        "n_routed_experts": experts(file),
        "n_shared_experts": shared,
        "moe_intermediate_size": _inner(file),
        "intermediate_size": _dense_inner(file),
        "first_k_dense_replace": _leading_dense(file),
        "routed_scaling_factor": decimal(file.of_model("expert_weights_scale", 1.0)),
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


_SHARED_GATE = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}

ARCHITECTURES: dict[str, GgufArchitecture] = {
    "qwen3moe": GgufArchitecture(_qwen3moe, {}),
    "qwen2moe": GgufArchitecture(_qwen2moe, _shared("shared_expert") | _SHARED_GATE),
    "llama": GgufArchitecture(_mixtral, {}, turned=True),
    "olmoe": GgufArchitecture(_olmoe, {}),
    "gpt-oss": GgufArchitecture(
        _gpt_oss,
        {
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
    ),
    "deepseek2": GgufArchitecture(_deepseek2, _LATENT | _shared("shared_experts")),
}


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """The entry of a file. ModelError where there is none, or the file is of a dense model."""
    name = file.architecture
    if not file.of_model("expert_count", 0):
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


def experts(file: GgufFile) -> int:
    """Experts of a layer."""
    return int(file.needed("expert_count"))


def dense_layers(file: GgufFile) -> list[int]:
    """Layers without a router."""
    return [layer for layer in range(blocks(file)) if f"blk.{layer}.ffn_gate_inp.weight" not in file.tensors]


def _leading_dense(file: GgufFile) -> int:
    layers = dense_layers(file)
    if layers != list(range(len(layers))):
        raise ModelError(f"{file.path} has dense layers among those with experts: {', '.join(map(str, layers))}")
    return len(layers)


def _inner(file: GgufFile) -> int:
    """Columns between an expert's matrices."""
    return _in_first_block(file, "ffn_down_exps.weight")[2]


def _dense_inner(file: GgufFile) -> int:
    """Columns between a dense layer's matrices; of no matter where there are none."""
    dense = dense_layers(file)
    return _shape(file, f"blk.{dense[0]}.ffn_down.weight")[1] if dense else _inner(file)


def _in_first_block(file: GgufFile, name: str) -> tuple[int, ...]:
    """The shape of a tensor in the first layer with experts."""
    dense = dense_layers(file)
    layer = next((layer for layer in range(blocks(file)) if layer not in dense), 0)
    return _shape(file, f"blk.{layer}.{name}")


def _shape(file: GgufFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise ModelError(f"{file.path} has no tensor {name}; convert the model again with a current llama.cpp")
    return file.tensors[name].shape
