"""Latent attention, and routers with groups, as GGUF, by the rules of llama.cpp's converter (`DeepseekV2Model`)."""

from __future__ import annotations

from typing import Any

import gguf

DEEPSEEK_V32, GLM_LITE = "deepseek32", "deepseek2"
_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM_DSA, 8)
"""Of a model with the same tensors as these."""
LATENT = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "mistral4", "kimi_linear",
)  # fmt: skip
"""Families with latent attention."""


def latent_name(path: str) -> str:
    """The name in the file of a parameter of DeepSeek-V3.2, which the gguf package does not have, or of GLM-4.7-Flash,
    of which it does not have the MTP head."""
    found = _NAMES.get_name(path, (".weight", ".bias"))
    assert found is not None, path
    return str(found)


def latent_metadata(writer: gguf.GGUFWriter, family: str, config: dict[str, Any]) -> None:
    """`DeepseekV2Model.set_gguf_parameters`."""
    latent, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    if family not in ("kimi_linear", "bailing_hybrid", "glm5_next_text"):
        writer.add_head_count_kv(1)
    writer.add_vocab_size(config["vocab_size"])
    if config.get("q_lora_rank") is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rotary)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    router_metadata(writer, config)
    if family != "glm4_moe_lite":  # whose published config does not say it
        softmax = family in ("deepseek_v2", "mistral4")
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SOFTMAX if softmax else kinds.SIGMOID)
    writer.add_rope_dimension_count(rotary)
    rope = config.get("rope_parameters", {})
    if (beta := rope.get("llama_4_scaling_beta")) is not None:
        writer.add_attn_temperature_scale(beta)
    if (scale := rope.get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)
    if "index_topk" in config:
        indexer_metadata(writer, config)


def indexer_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Of `DeepseekV32Model.set_gguf_parameters` and `GlmMoeDsaModel.set_gguf_parameters`."""
    writer.add_indexer_head_count(config["index_n_heads"])
    writer.add_indexer_key_length(config["index_head_dim"])
    writer.add_indexer_top_k(config["index_topk"])
    if "indexer_types" in config:
        writer.add_array(f"{writer.arch}.attention.indexer.types", [kind == "full" for kind in config["indexer_types"]])


def router_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kinds_ = config.get("mlp_layer_types") or []
    writer.add_leading_dense_block_count(config.get("first_k_dense_replace", kinds_.count("dense")))
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if config["n_group"] is not None:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
