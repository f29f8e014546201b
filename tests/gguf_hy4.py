"""Hunyuan 4 as GGUF, by the rules of llama.cpp's converter (`HYV4Model`). The gguf package does not have it.

The matrices are such that llama.cpp, which rotates neighbouring columns, computes what the model does, which rotates
those of both halves."""

from __future__ import annotations

from typing import Any

import gguf
from torch import Tensor

from gguf_deepseek4 import IN_BLOCK as DEEPSEEK4
from gguf_deepseek4 import name_in
from gguf_latent import latent_metadata

ARCHITECTURE = "hy_v4"
_IN_BLOCK = DEEPSEEK4 | {
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.k_b_proj.weight": "attn_k_b.weight",
    "self_attn.v_b_proj.weight": "attn_v_b.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.gate_proj.weight": "attn_gate.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def name_of(path: str) -> str:
    """The name in the file of a parameter of transformers' model."""
    return name_in(_IN_BLOCK, path)


def rotated_views(path: str, value: Tensor, config: Any) -> tuple[Tensor, ...]:
    """The parts of a parameter in the file's order; the parameter alone where none of its columns are rotated."""
    columns = {
        "q_b_proj.weight": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "kv_a_proj_with_mqa.weight": len(value),
        "indexer.wq_b.weight": config.index_head_dim,
        "indexer.wk.weight": len(value),
        "indexer.k_norm.weight": len(value),
        "indexer.k_norm.bias": len(value),
    }
    each = next((count for end, count in columns.items() if path.endswith(end)), None)
    if each is None:
        return (value,)
    views, plain = [], each - config.qk_rope_head_dim
    for head in value.split(each):
        rotated = head[plain:].view(2, config.qk_rope_head_dim // 2, *value.shape[1:]).swapaxes(0, 1)
        views += [head[:plain], rotated]
    return tuple(views)


def hy4_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`HYV4Model.set_gguf_parameters`."""
    latent_metadata(writer, ARCHITECTURE, {**config, "n_group": None})
    writer.add_swiglu_clamp_exp([config["swiglu_limit"]] * config["num_hidden_layers"])
    writer.add_uint32(f"{ARCHITECTURE}.hyper_connection.count", config["hc_mult"])
    writer.add_float32(f"{ARCHITECTURE}.hyper_connection.epsilon", config["hc_eps"])
    writer.add_float32(f"{ARCHITECTURE}.hyper_connection.magnitude", config["hc_magnitude"])
    writer.add_indexer_head_count(config["index_n_heads"])
    writer.add_indexer_key_length(config["index_head_dim"])
    writer.add_indexer_top_k(config["index_topk"])
    writer.add_array(f"{ARCHITECTURE}.attention.indexer.types", [kind == "full" for kind in config["indexer_types"]])
