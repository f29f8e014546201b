"""Llama 4: attention in chunks, layers without positions whose queries have a temperature, and one expert a token,
whose input is weighted and not its output."""

from __future__ import annotations

import math
from typing import Any

import torch

from tiermoe.formats.gguf_file import GgufFile, rounded
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.families.family import Family
from tiermoe.model.families.gguf import FREQUENCIES, Config, Gguf, block_names, divisors, grouped_fields
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import DenseBlock, MoeBlock, dense, moe
from tiermoe.model.rotary import Temperature, rope_complex
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope

_CHUNK = 8192  # positions that a layer attends to at once
_EVERY = 4  # the layers of which one has no positions, and no chunks
_WITHOUT_NORMS = 128  # experts of the model whose queries and keys have no norm (Maverick)
_TRAINED = 8192  # positions that the model was first trained for; frequencies of longer waves are scaled
NAMES = block_names("feed_forward", router="router", shared="shared_expert")
"""Tensors of a block → modules of a layer."""


class Llama4(Family):
    name, model_type = "Llama 4", "llama4_text"
    gguf = Gguf(("llama4",), NAMES, "feed_forward.experts", apart=(FREQUENCIES,))
    adapter = "llama4"
    normalised = False
    wide_angles = has_unrotated = True

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        chunk = config.attention_chunk_size if config.layer_types[index] == "chunked_attention" else None
        attention = grouped(
            w.at("self_attn"),
            config,
            index,
            window=chunk,
            chunked=True,
            rotary=None if config.no_rope_layers[index] else self.unrotated(config),
            rope=rope_complex,
            plain_norms=bool(config.use_qk_norm and chunk),
            norms_rotated=True,
        )
        return Layer(
            w.norm("input_layernorm"),
            attention,
            w.norm("post_attention_layernorm"),
            self.part(w.at("feed_forward"), config),
        )

    def part(self, w: Scope, config: ModelConfig) -> MoeBlock | DenseBlock:
        """The feed-forward part: dense in the layers that have no router."""
        if not w.has("router.weight"):
            return dense(w, config.intermediate_size_mlp, config.hidden_act)
        inner = config.intermediate_size
        rule = RouterRule(config.num_experts_per_tok, scores="sigmoid")
        shared = dense(w.at("shared_expert"), inner, config.hidden_act)
        return moe(w, rule, config.num_local_experts, inner, router="router", shared=shared, weighs_input=True)

    def lacks(self, config: ModelConfig) -> str:
        if config.num_experts_per_tok != 1:
            return "several experts a token"
        kinds = zip(config.layer_types, config.no_rope_layers, strict=False)
        if any((kind == "chunked_attention") != bool(rotated) for kind, rotated in kinds):
            return "positions without chunks, or chunks without them"
        return "" if config.attention_chunk_size else "chunks of no size"

    def temperature(self, config: ModelConfig) -> Temperature | None:
        if not config.attn_temperature_tuning:
            return None
        every, strength = config.floor_scale, config.attn_scale
        return lambda positions: torch.log1p(torch.floor((positions.float() + 1.0) / every)) * strength + 1.0

    def config(self, file: GgufFile) -> Config:
        if file.of_model("attention.sliding_window") == 0:
            raise file.refusal("has no chunks of positions, which every Llama 4 has", "take the model's safetensors")
        config, layers, dense = grouped_fields(file), range(file.layers), file.dense_layers
        return {
            **config,
            "num_local_experts": file.experts,
            "intermediate_size": file.expert_columns,
            "intermediate_size_mlp": file.dense_columns,
            "moe_layers": [layer for layer in layers if layer not in dense],
            "no_rope_layers": [int((layer + 1) % _EVERY != 0) for layer in layers],
            "attention_chunk_size": _CHUNK,
            "attn_temperature_tuning": True,
            "floor_scale": _CHUNK,
            "attn_scale": 0.1,
            "use_qk_norm": file.experts != _WITHOUT_NORMS,
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
        raise file.refusal(
            f"divides the frequencies of its rotary embedding by {factors.min():g} to {factors.max():g}, and Llama 4 "
            f"those of waves over {_TRAINED:,} positions by one number of at least 1"
        )
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 1.0, "original_max_position_embeddings": _TRAINED}
    return {**rope, "rope_type": "llama3", "factor": rounded(factor), **scaling}
