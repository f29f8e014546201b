"""Llama 4: attention in chunks, layers without positions whose queries have a temperature, and one expert a token,
whose input is weighted and not its output."""

from __future__ import annotations

from typing import Any

import torch

from tiermoe.model.attention.grouped import grouped
from tiermoe.model.families.family import Family
from tiermoe.model.layer import Layer
from tiermoe.model.moe import DenseBlock, MoeBlock, dense, moe
from tiermoe.model.rotary import Temperature, rope_complex
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope


class Llama4(Family):
    name, model_type = "Llama 4", "llama4_text"
    adapter = "llama4"
    normalised = False
    wide_angles = has_unrotated = True

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
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

    def part(self, w: Scope, config: Any) -> MoeBlock | DenseBlock:
        """The feed-forward part: dense in the layers that have no router."""
        inner = config.intermediate_size
        if not w.has("router.weight"):
            return dense(w, config.intermediate_size_mlp, config.hidden_act)
        rule = RouterRule(config.num_experts_per_tok, scores="sigmoid")
        shared = dense(w.at("shared_expert"), inner, config.hidden_act)
        return moe(w, rule, config.num_local_experts, inner, router="router", shared=shared, weighs_input=True)

    def lacks(self, config: Any) -> str:
        if config.num_experts_per_tok != 1:
            return "several experts a token"
        kinds = zip(config.layer_types, config.no_rope_layers, strict=False)
        if any((kind == "chunked_attention") != bool(rotated) for kind, rotated in kinds):
            return "positions without chunks, or chunks without them"
        return "" if config.attention_chunk_size else "chunks of no size"

    def temperature(self, config: Any) -> Temperature | None:
        if not config.attn_temperature_tuning:
            return None
        every, strength = config.floor_scale, config.attn_scale
        return lambda positions: torch.log1p(torch.floor((positions.float() + 1.0) / every)) * strength + 1.0
