"""GLM-4.5 and 4.6: grouped attention, DeepSeek-V3's feed-forward part. Solar Open has the same layers, and so has
dots.llm1, some with a sliding window."""

from __future__ import annotations

from typing import Any

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.families.deepseek_v3 import SHARED_NAMES, v3_part
from tiermoe.model.families.family import Family, HeadFormat
from tiermoe.model.families.fields import (
    AGAIN,
    SIGMOID,
    Config,
    dense_columns,
    expert_columns,
    expert_count,
    leading_dense,
    partly_rotated_fields,
)
from tiermoe.model.families.names import LATE_NORM, Gguf
from tiermoe.model.layer import Layer
from tiermoe.model.weights import Scope


class Glm4Moe(Family):
    name, model_type = "GLM4-MoE", "glm4_moe"
    gguf = Gguf(("glm4moe",), SHARED_NAMES | LATE_NORM)
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

    def config(self, file: GgufFile) -> Config:
        return {
            **partly_rotated_fields(file),
            "model_type": "glm4_moe",
            "n_routed_experts": expert_count(file),
            "n_shared_experts": file.count("expert_shared_count"),
            "moe_intermediate_size": expert_columns(file),
            "intermediate_size": dense_columns(file),
            "first_k_dense_replace": leading_dense(file),
            "routed_scaling_factor": file.decimal("expert_weights_scale", 1.0),
            "norm_topk_prob": bool(file.of_model("expert_weights_norm", False)),
            "n_group": file.count("expert_group_count", 1),
            "topk_group": file.count("expert_group_used_count", 1),
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

    def window(self, config: Any, index: int) -> int | None:
        return window_at(config, index)

    def config(self, file: GgufFile) -> Config:
        """GLM-4.5's fields: the layers are the same. None has a window (models/dots1.cpp). ModelError for routers that
        are not dots.llm1's; older files say nothing of them."""
        if file.count("expert_gating_func", SIGMOID) != SIGMOID:
            raise ModelError(f"{file.path} has no sigmoid router, which every dots.llm1 has; {AGAIN}")
        return {**super().config(file), "model_type": "dots1", "sliding_window": None}
