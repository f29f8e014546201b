"""Entries of tiny models' GGUF files, by the rules of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf

from gguf_deepseek4 import deepseek4_metadata
from gguf_gemma4 import gemma4_metadata
from gguf_glm5_next import glm5_metadata
from gguf_granite_swa import granite_swa_metadata
from gguf_hunyuan3 import hunyuan3_metadata
from gguf_hy4 import hy4_metadata
from gguf_latent import LATENT, latent_metadata, router_metadata
from gguf_linear import kimi_metadata, linear_metadata
from gguf_ling import ling_metadata
from gguf_llama4 import llama4_metadata
from gguf_mamba import granite_metadata, jamba_metadata, nemotron_metadata
from gguf_mellum import mellum_metadata
from gguf_mimo2 import mimo_metadata
from gguf_minimax import minimax_metadata
from gguf_phimoe import phimoe_metadata
from gguf_qwen4 import qwen4_metadata

Metadata = Callable[[gguf.GGUFWriter, dict[str, Any]], None]

ALONE: dict[str, Metadata] = {
    "deepseek_v4": deepseek4_metadata, "hy_v4": hy4_metadata, "bailing_hybrid": ling_metadata,
    "glm5_next_text": glm5_metadata, "mimo_v2_flash": mimo_metadata, "gemma4_text": gemma4_metadata,
}  # fmt: skip
"""Families that add all beside what every one has."""


MORE: dict[str, Metadata] = {
    "granitemoe_swa": granite_swa_metadata, "nemotron_h": nemotron_metadata, "jamba": jamba_metadata,
    "llama4_text": llama4_metadata, "minimax_m3_vl_text": minimax_metadata, "qwen4_exp_text": qwen4_metadata,
    "mellum": mellum_metadata, "hy_v3": hunyuan3_metadata, "phimoe": phimoe_metadata,
}  # fmt: skip
"""Families that add to what others have."""


USED = {"ernie4_5_moe": "moe_k", "hunyuan_v1_moe": "moe_topk", "gemma4_text": "top_k_experts"}
"""Families whose configs call the experts of a token otherwise."""


EPSILON = {"lfm2_moe": "norm_eps", "nemotron_h": "layer_norm_epsilon"}
"""What other families' configs call the norms' epsilon."""


HYBRID = ("granitemoehybrid", "jamba", "nemotron_h")
"""Families with layers of Mamba beside those with attention."""


TURNED = ("mixtral", "deepseek", "granitemoehybrid", "granitemoeshared", "granitemoe_swa", "nemotron_h")
"""Families whose queries and keys are written with the halves of each head in turns."""


def add_metadata(writer: gguf.GGUFWriter, family: str, config: dict[str, Any]) -> None:
    """`TextModel.set_gguf_parameters` and what each class adds."""
    rope = config.get("rope_parameters") or {"rope_theta": 1e4}
    if "compress" in rope:  # DeepSeek-V4: by one scaling, and another base
        rope = {**rope["compress"], "rope_theta": config["rope_theta"]}
    if "full_attention" in rope:  # MiMo's: layers with a window have another base
        rope = rope["full_attention"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    inner = ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size")
    writer.add_feed_forward_length(next((config[name] for name in inner if name in config), 0))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config[EPSILON.get(family, "rms_norm_eps")])
    writer.add_rope_freq_base(rope["rope_theta"])
    experts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    writer.add_expert_count(next(config[name] for name in experts if name in config))
    writer.add_expert_used_count(config[USED.get(family, "num_experts_per_tok")])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if family in ALONE:
        ALONE[family](writer, config)
        return
    if family == "kimi_linear":
        kimi_metadata(writer, config)
    if family in LATENT:
        latent_metadata(writer, family, config)
        return
    if family == "lfm2_moe":
        kinds = config["layer_types"]
        writer.add_head_count_kv([config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
    elif family in HYBRID:
        kinds = config["layer_types"]
        writer.add_head_count_kv([config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds])
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
    if family.startswith("granitemoe"):
        granite_metadata(writer, config)
    if config.get("head_dim") is not None:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if family in TURNED:
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
    if family in ("glm4_moe", "minimax_m2", "minimax_m3_vl_text", "lfm2_moe"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if family == "glm4_moe":
        router_metadata(writer, config)
    if family == "dots1":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        router_metadata(writer, config)
    if family == "deepseek":
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_weights_scale(1.0)
        writer.add_expert_shared_count(config["n_shared_experts"])
    if family == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
    if family == "exaone_moe":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        writer.add_expert_shared_count(config["num_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if family == "afmoe":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_expert_shared_count(config["num_shared_experts"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(config["route_scale"])
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if family in MORE:
        MORE[family](writer, config)
    if family == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
