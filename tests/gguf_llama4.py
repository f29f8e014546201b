"""Llama 4 as GGUF, by the rules of llama.cpp's converter (`Llama4Model`)."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 16.0, "low_freq_factor": 1.0,
          "high_freq_factor": 1.0, "original_max_position_embeddings": 8192}  # fmt: skip
"""The rotary embedding of Llama 4 Scout, by another base."""


def llama4_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`Llama4Model.set_gguf_parameters`."""
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def add_factors(writer: gguf.GGUFWriter, rope: dict[str, Any], columns: int) -> None:
    """`LlamaModel.generate_extra_tensors`, of a scaling without waves between short and long ones."""
    frequencies = 1.0 / (rope["rope_theta"] ** (np.arange(0, columns, 2, dtype=np.float32) / columns))
    longest = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    factors = np.where(2 * np.pi / frequencies > longest, rope["factor"], 1)
    writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
