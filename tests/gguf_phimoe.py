"""Phi-MoE as GGUF, by the rules of llama.cpp's converter (`Phi3MiniModel` and `PhiMoeModel`)."""

from __future__ import annotations

import math
from typing import Any

import gguf
import numpy as np


def phimoe_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`Phi3MiniModel.set_gguf_parameters`, beside what all models have, and the factors of LongRoPE
    (`generate_extra_tensors`)."""
    rope, trained = config["rope_parameters"], config["max_position_embeddings"]
    writer.add_sliding_window(config["sliding_window"] or 0)
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    if "long_factor" in rope:
        first = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(first)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(trained / first) / math.log(first)))
        for reach in ("long", "short"):
            writer.add_tensor(f"rope_factors_{reach}.weight", np.array(rope[f"{reach}_factor"], dtype=np.float32))


def name_in_checkpoint(path: str) -> str:
    """The name that the published checkpoints have for a parameter of transformers' model."""
    return path.replace("mlp.router", "block_sparse_moe.gate")
