"""A.X-K1: DeepSeek-V3's layers with a norm after the feed-forward part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiermoe.model.families.deepseek_v3 import DeepSeekV3
from tiermoe.model.layer import Layer
from tiermoe.model.weights import Scope


class AxK1(DeepSeekV3):
    name, model_type = "A.X-K1", "axk1"
    mtp_head = None

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        layer, norm = super().layer(w, config, index), "mlp.post_mlp_layernorm"
        part = layer.feed_forward
        return replace(layer, feed_forward=replace(part, norm=w.norm(norm))) if w.has(norm) else layer
