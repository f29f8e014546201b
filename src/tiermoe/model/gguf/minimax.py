"""MiniMax-M2 and MiniMax-M3 in GGUF files (`MiniMaxM2Model` and `MiniMaxM3Model` of the converter): their configs, and
what an indexer's tensors are called."""

from __future__ import annotations

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.gguf.config import SIGMOID, Config, partly_turned
from tiermoe.model.gguf.shapes import AGAIN, blocks, dense_inner, experts, in_first_block, inner, leading_dense, shape

INDEXER = {f"indexer.{name}": f"self_attn.indexer.{name}" for name in ("q_proj", "k_proj", "q_norm", "k_norm")}
"""Tensors of a layer's indexer → modules, beside the usual ones."""
_ALPHA, _LIMIT = 1.702, 7.0  # LLM_FFN_SWIGLU_OAI_MOE of llama-graph.cpp: no entry has them


def minimaxm2(file: GgufFile) -> Config:
    return {
        **partly_turned(file),
        "model_type": "minimax_m2",
        "num_local_experts": experts(file),
        "intermediate_size": inner(file),
    }


def minimaxm3(file: GgufFile) -> Config:
    """All layers with experts have an indexer (models/minimax-m3.cpp). ModelError where one lacks a tensor of it."""
    dense = leading_dense(file)
    sparse = range(dense, blocks(file))
    for layer in sparse:
        for name in INDEXER:
            shape(file, f"blk.{layer}.{name}.weight", 1 if name.endswith("norm") else 2)
    if file.count("expert_gating_func") != SIGMOID or file.of_model("expert_weights_norm") is not True:
        raise ModelError(
            f"{file.path} has no sigmoid router whose weights sum to 1, which every MiniMax-M3 has; {AGAIN}"
        )
    return {
        **partly_turned(file),
        "model_type": "minimax_m3_vl_text",
        "num_local_experts": experts(file),
        "intermediate_size": inner(file),
        "dense_intermediate_size": dense_inner(file),
        "shared_intermediate_size": in_first_block(file, "ffn_gate_shexp.weight", 2)[0],
        "routed_scaling_factor": file.decimal("expert_weights_scale"),
        "swiglu_alpha": _ALPHA,
        "swiglu_limit": _LIMIT,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * len(sparse),
        "layer_types": ["full_attention"] * dense + ["minimax_m3_sparse"] * len(sparse),
        "index_n_heads": file.count("attention.indexer.head_count", least=1),
        "index_head_dim": file.count("attention.indexer.key_length", least=1),
        "index_block_size": file.count("attention.indexer.block_size", least=1),
        "index_topk_blocks": file.count("attention.indexer.top_k", least=1),
        "index_local_blocks": file.count("attention.indexer.local_blocks"),
    }
