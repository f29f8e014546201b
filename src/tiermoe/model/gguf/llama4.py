"""Llama 4 in GGUF files (`Llama4Model` of the converter): its config. What no entry says is a number in llama.cpp
(`src/models/llama4.cpp`)."""

from __future__ import annotations

import math
from typing import Any

import torch

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile, rounded
from tiermoe.model.gguf.config import Config, grouped
from tiermoe.model.gguf.frequencies import FREQUENCIES, divisors
from tiermoe.model.gguf.shapes import AGAIN, blocks, dense_inner, dense_layers, experts, inner

_CHUNK = 8192  # positions that a layer attends to at once
_EVERY = 4  # the layers of which one has no positions, and no chunks
_WITHOUT_NORMS = 128  # experts of the model whose queries and keys have no norm (Maverick)
_TRAINED = 8192  # positions that the model was first trained for; frequencies of longer waves are scaled


def llama4(file: GgufFile) -> Config:
    if file.of_model("attention.sliding_window") == 0:
        raise ModelError(
            f"{file.path} has no chunks of positions, which every Llama 4 has; take the model's safetensors"
        )
    config, layers, dense = grouped(file), range(blocks(file)), dense_layers(file)
    return {
        **config,
        "model_type": "llama4_text",
        "num_local_experts": experts(file),
        "intermediate_size": inner(file),
        "intermediate_size_mlp": dense_inner(file),
        "moe_layers": [layer for layer in layers if layer not in dense],
        "no_rope_layers": [int((layer + 1) % _EVERY != 0) for layer in layers],
        "attention_chunk_size": _CHUNK,
        "attn_temperature_tuning": True,
        "floor_scale": _CHUNK,
        "attn_scale": 0.1,
        "use_qk_norm": experts(file) != _WITHOUT_NORMS,
        "rope_parameters": _scaled(file, config["rope_parameters"], config["head_dim"]),
    }


def _scaled(file: GgufFile, rope: dict[str, Any], columns: int) -> dict[str, Any]:
    """`rope` with the scaling that the file's factors are, of models that scale it (Scout). ModelError where they are
    not Llama 4's: one factor of all waves that are longer than the model was first trained for."""
    factors = divisors(file, FREQUENCIES, columns)
    if factors is None:
        return rope
    waves = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, columns, 2) / columns)
    factor = float(factors[-1])
    expected = torch.where(waves > _TRAINED, factor, 1.0)
    if not 1 <= factor < math.inf or not torch.equal(factors, expected):
        raise ModelError(
            f"{file.path} divides the frequencies of its rotary embedding by {factors.min():g} to {factors.max():g}, "
            f"and Llama 4 those of waves over {_TRAINED:,} positions by one number of at least 1; {AGAIN}"
        )
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 1.0, "original_max_position_embeddings": _TRAINED}
    return {**rope, "rope_type": "llama3", "factor": rounded(factor), **scaling}
