"""DeepSeek-V4 as GGUF, by the rules of llama.cpp's converter (`DeepseekV4Model`). The gguf package does not have it."""

from __future__ import annotations

from typing import Any

import gguf

from gguf_names import CONNECTIONS

ARCHITECTURE = "deepseek4"
_GATING = {"sigmoid": 2, "sqrtsoftplus": 4}
_NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "norm.weight": "output_norm.weight",
    "hc_head.hc_fn": "output_hc_fn.weight",
    "hc_head.hc_base": "output_hc_base.weight",
    "hc_head.hc_scale": "output_hc_scale.weight",
}
IN_BLOCK = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.sinks.weight": "attn_sinks.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.q_a_norm.weight": "attn_q_a_norm.weight",
    "self_attn.kv_proj.weight": "attn_kv.weight",
    "self_attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_a_proj.weight": "attn_output_a.weight",
    "self_attn.o_b_proj.weight": "attn_output_b.weight",
    "self_attn.compressor.position_bias": "attn_compressor_ape.weight",
    "self_attn.compressor.kv_proj.weight": "attn_compressor_kv.weight",
    "self_attn.compressor.gate_proj.weight": "attn_compressor_gate.weight",
    "self_attn.compressor.kv_norm.weight": "attn_compressor_norm.weight",
    "self_attn.compressor.indexer.q_b_proj.weight": "indexer.attn_q_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "indexer.proj.weight",
    "self_attn.compressor.indexer.position_bias": "indexer_compressor_ape.weight",
    "self_attn.compressor.indexer.kv_proj.weight": "indexer_compressor_kv.weight",
    "self_attn.compressor.indexer.gate_proj.weight": "indexer_compressor_gate.weight",
    "self_attn.compressor.indexer.kv_norm.weight": "indexer_compressor_norm.weight",
    **CONNECTIONS,
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.tid2eid": "ffn_gate_tid2eid.weight",
    "mlp.gate.e_score_correction.bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.experts.gate_proj.weight": "ffn_gate_exps.weight",
    "mlp.experts.up_proj.weight": "ffn_up_exps.weight",
    "mlp.experts.down_proj.weight": "ffn_down_exps.weight",
}


def name_of(path: str) -> str:
    """The name in the file of a parameter of transformers' model."""
    return name_in(IN_BLOCK, path)


def name_in(in_block: dict[str, str], path: str) -> str:
    """The name in the file of a parameter; in_block: of those of a layer."""
    own = path.removeprefix("model.")
    if own in _NAMES:
        return _NAMES[own]
    _, layer, name = own.split(".", 2)
    return f"blk.{layer}.{in_block[name]}"


def deepseek4_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`DeepseekV4Model.set_gguf_parameters`."""
    rates = {"sliding_attention": 0, **config["compress_rates"]}
    ratios = [rates[kind] for kind in config["layer_types"]] + [0]  # a layer that predicts several tokens
    layers = config["num_hidden_layers"]
    numbers = {
        "attention.sliding_window": config["sliding_window"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.output_group_count": config["o_groups"],
        "attention.output_lora_rank": config["o_lora_rank"],
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
        "hyper_connection.count": config["hc_mult"],
        "hyper_connection.sinkhorn_iterations": config["hc_sinkhorn_iters"],
        "hash_layer_count": config["mlp_layer_types"].count("hash_moe"),
        "rope.dimension_count": config["qk_rope_head_dim"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_gating_func": _GATING[config["scoring_func"]],
        "embedding_length_out": config["hidden_size"] * config["hc_mult"],
    }
    for key, value in numbers.items():
        writer.add_uint32(f"{ARCHITECTURE}.{key}", value)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_head_count_kv(1)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_array(f"{ARCHITECTURE}.attention.compress_ratios", ratios)
    for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        writer.add_array(f"{ARCHITECTURE}.{key}", [config["swiglu_limit"]] * layers)
    writer.add_float32(f"{ARCHITECTURE}.attention.compress_rope_freq_base", config["compress_rope_theta"])
    writer.add_float32(f"{ARCHITECTURE}.hyper_connection.epsilon", config["hc_eps"])
