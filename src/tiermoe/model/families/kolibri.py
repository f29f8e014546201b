"""Kolibri 1: grouped attention, some layers of which have a window, norms before and after each part, and a sigmoid
router whose correction is added to logits."""

from __future__ import annotations

from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.families.family import Family
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import dense, moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope


class Kolibri(Family):
    name, model_type = "Kolibri 1", "kolibri1"
    has_unrotated = on_gpu = True

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        window = window_at(config, index)
        unrotated = config.sliding_window is not None and window is None
        attention = grouped(
            w.at("self_attn"),
            config,
            index,
            window=window,
            rotary=self.unrotated(config) if unrotated else None,
            norms=("q_norm", "k_norm"),
        )
        rule = RouterRule(
            config.num_experts_per_tok,
            scores="sigmoid",
            normalise=bool(config.norm_topk_prob),
            corrects_logits=True,
            wide=True,
            rounded=False,
        )
        part = w.at("mlp")
        shared = dense(part.at("shared_experts"), config.shared_expert_intermediate_size, config.hidden_act)
        fed = moe(
            part,
            rule,
            config.num_local_experts,
            config.moe_intermediate_size,
            correction="gate.e_score_correction_bias",
            shared=shared,
            norm=w.norm("post_mlp_layernorm"),
        )
        return Layer(
            w.norm("input_layernorm"),
            attention,
            w.norm("post_attention_layernorm"),
            fed,
            norm_attended=w.norm("post_self_attn_layernorm"),
        )
