"""The entries that llama.cpp's converter writes into a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from gguf_linear import linear_metadata


def add_metadata(writer: gguf.GGUFWriter, family: str, config: dict[str, Any]) -> None:
    """`TextModel.set_gguf_parameters` and what each class adds."""
    rope = config["rope_parameters"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config.get("intermediate_size", 0))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["norm_eps" if family == "lfm2_moe" else "rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    experts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    writer.add_expert_count(next(config[name] for name in experts if name in config))
    writer.add_expert_used_count(config["moe_k" if family == "ernie4_5_moe" else "num_experts_per_tok"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if family.startswith("deepseek"):
        _latent_metadata(writer, family, config)
        return
    if family == "lfm2_moe":
        kinds = config["layer_types"]
        writer.add_head_count_kv([config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
    if config.get("head_dim") is not None:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if family == "mixtral":
        writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
        writer.add_vocab_size(config["vocab_size"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if "linear_num_value_heads" in config:
        linear_metadata(writer, config)
    if "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    if family in ("glm4_moe", "minimax_m2", "lfm2_moe"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if family == "glm4_moe":
        _router_metadata(writer, config)
    if family == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
    if family == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])


def _latent_metadata(writer: gguf.GGUFWriter, family: str, config: dict[str, Any]) -> None:
    """`DeepseekV2Model.set_gguf_parameters`."""
    latent, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_vocab_size(config["vocab_size"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rotary)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    _router_metadata(writer, config)
    sigmoid = family == "deepseek_v3"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)
    writer.add_rope_dimension_count(rotary)
    if (scale := config["rope_parameters"].get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)


def _router_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if config["n_group"] is not None:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Path, size: int) -> None:
    """The byte-level BPE of a tokenizer.json, cut or padded to `size` tokens."""
    import json

    document = json.loads(tokenizer.read_text())
    special = {added["id"]: added["content"] for added in document["added_tokens"] if added["special"]}
    by_id = {index: token for token, index in document["model"]["vocab"].items()} | special
    ids = range(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id.get(index, f"[PAD{index}]") for index in ids])
    kinds_ = gguf.TokenType
    writer.add_token_types(
        [kinds_.CONTROL if i in special else kinds_.NORMAL if i in by_id else kinds_.UNUSED for i in ids]
    )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]]
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
