"""MiniMax-M3 as GGUF, by the rules of llama.cpp's converter (`MiniMaxM3Model`). The gguf package does not have it."""

from __future__ import annotations

from typing import Any

import gguf

ARCHITECTURE = "minimax-m3"
_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DOTS1, 8)
"""Of a model with the same tensors but for the indexers', which are called as in `INDEXER_Q_PROJ` and its like."""


def name_of(path: str) -> str:
    """The name in the file of a parameter of transformers' model."""
    layer, _, name = path.partition(".self_attn.indexer.")
    if name:
        return f"blk.{layer.rpartition('.')[2]}.indexer.{name}"
    found = _NAMES.get_name(path, (".weight", ".bias"))
    assert found is not None, path
    return str(found)


def minimax_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`MiniMaxM3Model.set_gguf_parameters`."""
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_shared_count(config["shared_intermediate_size"] // config["intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(True)
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    numbers = {
        "head_count": config["index_n_heads"],
        "key_length": config["index_head_dim"],
        "top_k": config["index_topk_blocks"],
        "block_size": config["index_block_size"],
        "local_blocks": config["index_local_blocks"],
    }
    for key, value in numbers.items():
        writer.add_uint32(f"{ARCHITECTURE}.attention.indexer.{key}", value)
