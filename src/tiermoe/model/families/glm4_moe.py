"""GLM-4.5 and 4.6: grouped attention, DeepSeek-V3's feed-forward part. Solar Open has the same layers, and so has
dots.llm1, some with a sliding window."""

from __future__ import annotations

from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.families.deepseek_v3 import SHARED_NAMES, v3_part
from tiermoe.model.families.family import Family, HeadFormat
from tiermoe.model.families.gguf import LATE_NORM, SIGMOID, Config, Gguf, partly_rotated_fields, routed_fields
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.weights import Scope


class Glm4Moe(Family):
    name, model_type = "GLM4-MoE", "glm4_moe"
    on_gpu = True
    gguf = Gguf(("glm4moe",), SHARED_NAMES | LATE_NORM)
    mtp_head: HeadFormat | None = HeadFormat()

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, window=self.window(config, index), norms=("q_norm", "k_norm")),
            w.norm("post_attention_layernorm"),
            v3_part(w.at("mlp"), config),
        )

    def window(self, config: ModelConfig, index: int) -> int | None:
        """Of layer `index`."""
        return None

    def config(self, file: GgufFile) -> Config:
        return {
            **partly_rotated_fields(file),
            **routed_fields(file),
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
            "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        }


class SolarOpen(Glm4Moe):
    name, model_type = "Solar Open", "solar_open"
    mtp_head = None


class Dots1(Glm4Moe):
    name, model_type = "dots.llm1", "dots1"
    gguf = Gguf(("dots1",), SHARED_NAMES)
    mtp_head = None

    def window(self, config: ModelConfig, index: int) -> int | None:
        return window_at(config, index)

    def config(self, file: GgufFile) -> Config:
        """GLM-4.5's fields: the layers are the same. None has a window (models/dots1.cpp). ModelError for routers that
        are not dots.llm1's; older files say nothing of them."""
        if file.count("expert_gating_func", SIGMOID) != SIGMOID:
            raise file.refusal("has no sigmoid router, which every dots.llm1 has")
        return {**super().config(file), "sliding_window": None}
