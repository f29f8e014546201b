"""Mellum 2 as GGUF, by the rules of llama.cpp's converter (`MellumModel`). The gguf package does not have it; Qwen3-MoE
has the same tensors."""

from __future__ import annotations

from typing import Any

import gguf

from gguf_names import name_in_file

ARCHITECTURE = "mellum"
_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, 8)


def name_of(path: str) -> str:
    """The name in the file of a parameter of transformers' model."""
    return name_in_file(path, {}, _NAMES)


def mellum_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """`MellumModel.set_gguf_parameters`."""
    rope = config["rope_parameters"]
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if (factor := rope["full_attention"].get("attention_factor")) is not None:
        writer.add_rope_scaling_yarn_attn_factor(factor)
    if config["sliding_window"] is not None:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
