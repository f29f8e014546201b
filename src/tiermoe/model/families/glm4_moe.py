"""GLM-4.5 and 4.6: grouped attention, DeepSeek-V3's feed-forward part. Solar Open has the same layers, and so has
dots.llm1, some with a sliding window."""

from __future__ import annotations

from typing import Any

from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.families.deepseek_v3 import v3_part
from tiermoe.model.families.family import Family, HeadFormat
from tiermoe.model.layer import Layer
from tiermoe.model.weights import Scope


class Glm4Moe(Family):
    name, model_type = "GLM4-MoE", "glm4_moe"
    mtp_head: HeadFormat | None = HeadFormat()

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, window=self.window(config, index), norms=("q_norm", "k_norm")),
            w.norm("post_attention_layernorm"),
            v3_part(w.at("mlp"), config),
        )

    def window(self, config: Any, index: int) -> int | None:
        """Of layer `index`."""
        return None


class SolarOpen(Glm4Moe):
    name, model_type = "Solar Open", "solar_open"
    mtp_head = None


class Dots1(Glm4Moe):
    name, model_type = "dots.llm1", "dots1"
    mtp_head = None

    def window(self, config: Any, index: int) -> int | None:
        return window_at(config, index)
