"""What llama.cpp must be told of an architecture, and which models of it llama.cpp computes as transformers does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gguf

from tiermoe.bench.llama.checkpoint import expert_count

Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """One that is written. refusals: what a model of it may not be, each with whether a config is so. add: writes its
    own metadata beside what all have."""

    arch: gguf.MODEL_ARCH
    refusals: Callable[[Config], dict[str, bool]]
    add: Callable[[gguf.GGUFWriter, Config], None]


def architecture_of(config: Config) -> Architecture:
    """The architecture of a config.json. ValueError where llama.cpp would not compute the model's function."""
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"{', '.join(ARCHITECTURES)} checkpoints are written, not {kind!r}")
    found = ARCHITECTURES[kind]
    refused = {
        "an activation other than silu": config.get("hidden_act", "silu") != "silu",
        **_rope_refusals(config),
        **found.refusals(config),
    }
    for what, so in refused.items():
        if so:
            raise ValueError(f"llama.cpp computes no {kind} model with {what}")
    return found


def add_metadata(writer: gguf.GGUFWriter, config: Config) -> None:
    """Everything but the tokenizer and the file's type."""
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(expert_count(config))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    _add_rope(writer, config)
    architecture_of(config).add(writer, config)


def rope_of(config: Config) -> Config:
    """The rotary embedding's settings, which transformers 5 keeps in one place and older checkpoints in three."""
    found = {"rope_theta": config.get("rope_theta"), "partial_rotary_factor": config.get("partial_rotary_factor")}
    for name in ("rope_scaling", "rope_parameters"):
        found |= config.get(name) or {}
    return {**found, "rope_type": found.get("rope_type") or found.get("type") or "default"}


def _rope_refusals(config: Config) -> dict[str, bool]:
    rope = rope_of(config)
    scaled = rope["rope_type"] == "yarn"
    ours = config["model_type"] == "deepseek_v2"
    return {
        f"rotary embedding {rope['rope_type']!r}": rope["rope_type"] not in ("default", "yarn"),
        "no rope_theta": rope["rope_theta"] is None,
        "an attention factor of its own": scaled and rope.get("attention_factor") is not None,
        "mscale beside another mscale_all_dim": scaled and rope.get("mscale") != rope.get("mscale_all_dim"),
        "mscale": scaled and not ours and rope.get("mscale") is not None,
    }


def _add_rope(writer: gguf.GGUFWriter, config: Config) -> None:
    rope = rope_of(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)


def _add_heads(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])


def _qwen3_refusals(config: Config) -> dict[str, bool]:
    return {
        "dense layers": bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1,
        "attention biases": bool(config.get("attention_bias")),
        "gate weights that are not normalised": not config.get("norm_topk_prob"),
    }


def _add_qwen3(writer: gguf.GGUFWriter, config: Config) -> None:
    _add_heads(writer, config)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _gpt_oss_refusals(config: Config) -> dict[str, bool]:
    layers = config.get("layer_types") or []
    other = [kind for i, kind in enumerate(layers) if kind != ("full_attention" if i % 2 else "sliding_attention")]
    return {
        "layers that do not alternate between sliding and full attention": bool(other),
        "another swiglu_limit than 7": config.get("swiglu_limit", 7.0) != 7.0,
        "another swiglu_alpha than 1.702": config.get("swiglu_alpha", 1.702) != 1.702,
        "an output layer that is its embedding": bool(config.get("tie_word_embeddings")),
    }


def _add_gpt_oss(writer: gguf.GGUFWriter, config: Config) -> None:
    _add_heads(writer, config)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _deepseek_v2_refusals(config: Config) -> dict[str, bool]:
    return {
        "experts in groups": config.get("topk_method", "greedy") != "greedy",
        "gate weights that are normalised": bool(config.get("norm_topk_prob")),
        "biases": bool(config.get("attention_bias") or config.get("mlp_bias")),
        "key/value heads that share": config["num_key_value_heads"] != config["num_attention_heads"],
    }


def _add_deepseek_v2(writer: gguf.GGUFWriter, config: Config) -> None:
    """llama.cpp attends over the latent, which is one head's key and value; decompressed they are the `mla` ones."""
    latent, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(config["q_lora_rank"] or 0)
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rotary)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotary)
    if (mscale := rope_of(config).get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * mscale)  # llama.cpp divides by 0.1 again
    _add_shared_experts(writer, config, gguf.ExpertGatingFuncType.SOFTMAX)


def _glm4_refusals(config: Config) -> dict[str, bool]:
    return {"experts in groups": config.get("n_group", 1) != 1}


def _add_glm4(writer: gguf.GGUFWriter, config: Config) -> None:
    _add_heads(writer, config)
    share = rope_of(config)["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config["head_dim"] * (0.5 if share is None else share)))
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    _add_shared_experts(writer, config, gguf.ExpertGatingFuncType.SIGMOID)


def _add_shared_experts(writer: gguf.GGUFWriter, config: Config, gating: gguf.ExpertGatingFuncType) -> None:
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_gating_func(gating)


ARCHITECTURES = {
    "qwen3_moe": Architecture(gguf.MODEL_ARCH.QWEN3MOE, _qwen3_refusals, _add_qwen3),
    "gpt_oss": Architecture(gguf.MODEL_ARCH.GPT_OSS, _gpt_oss_refusals, _add_gpt_oss),
    "deepseek_v2": Architecture(gguf.MODEL_ARCH.DEEPSEEK2, _deepseek_v2_refusals, _add_deepseek_v2),
    "glm4_moe": Architecture(gguf.MODEL_ARCH.GLM4_MOE, _glm4_refusals, _add_glm4),
}
"""`model_type` of config.json → how it is written."""
