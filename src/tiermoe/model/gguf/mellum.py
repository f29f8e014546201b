"""Mellum 2 in GGUF files (`MellumModel` of the converter): its config."""

from __future__ import annotations

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.gguf.config import Config, grouped, window_layers
from tiermoe.model.gguf.shapes import AGAIN, blocks, dense_layers, experts, inner


def mellum(file: GgufFile) -> Config:
    """No layer has a window where the file has no size of one. ModelError for layers without experts, and for weights
    that are scaled."""
    if dense := dense_layers(file):
        raise ModelError(
            f"{file.path} has layers without experts ({', '.join(map(str, dense))}), which no Mellum 2 has; {AGAIN}"
        )
    if (scale := file.decimal("expert_weights_scale", 1.0)) != 1.0:
        raise ModelError(f"{file.path} scales its experts' weights by {scale:g}, which no Mellum 2 does; {AGAIN}")
    config, window = grouped(file), file.count("attention.sliding_window", 0)
    rope = config["rope_parameters"]
    return {
        **config,
        "model_type": "mellum",
        "num_experts": experts(file),
        "moe_intermediate_size": inner(file),
        "norm_topk_prob": True,  # models/mellum.cpp, as that a window's layers do not scale their rotary embedding
        "sliding_window": window or None,
        "layer_types": window_layers(file) if window else ["full_attention"] * blocks(file),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.decimal("rope.freq_base_swa", rope["rope_theta"]),
            },
        },
    }
