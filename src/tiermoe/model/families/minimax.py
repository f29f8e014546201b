"""MiniMax-M2 and M3: grouped attention, in M3 to blocks of positions that an indexer chooses for each group of heads,
and a sigmoid router with a correction."""

from __future__ import annotations

from typing import Any

from dataclasses import replace

from tiermoe.kernels.gates import ClampedGate
from tiermoe.model.attention.group_indexer import group_indexer
from tiermoe.model.attention.grouped import grouped
from tiermoe.model.families.deepseek_v3 import CORRECTION
from tiermoe.model.families.family import Family
from tiermoe.model.layer import Layer
from tiermoe.model.moe import DenseBlock, MoeBlock, dense, moe
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import NormKind, Scope

_NORMS = ("q_norm", "k_norm")


def _rule(config: Any) -> RouterRule:
    return RouterRule(config.num_experts_per_tok, scores="sigmoid", normalise=True, rounded=False)


class MiniMaxM2(Family):
    name, model_type = "MiniMax-M2", "minimax_m2"
    normalised = True

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        experts, correction = config.num_local_experts, "e_score_correction_bias"
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, norms=_NORMS, norm_all_heads=True),
            w.norm("post_attention_layernorm"),
            moe(w.at("mlp"), _rule(config), experts, config.intermediate_size, correction=correction),
        )


class MiniMaxM3(Family):
    """Gate and up of dense blocks and of shared experts are one matrix."""

    name, model_type = "MiniMax-M3", "minimax_m3_vl_text"
    normalised = True
    norms = NormKind(centred=True)

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        part = w.at("self_attn")
        indexer = None
        if config.layer_types[index] == "minimax_m3_sparse":
            indexer = group_indexer(part.at("indexer"), config)
        return Layer(
            w.norm("input_layernorm"),
            grouped(part, config, index, norms=_NORMS, indexer=indexer),
            w.norm("post_attention_layernorm"),
            self.part(w.at("mlp"), config),
            indexer=indexer,
        )

    def part(self, w: Scope, config: Any) -> MoeBlock | DenseBlock:
        """The feed-forward part: dense in the layers that have no router."""
        gate, first = ClampedGate(float(config.swiglu_limit), float(config.swiglu_alpha), halves=True), ("gate_up_proj",)
        if not w.has("gate.weight"):
            return dense(w, config.dense_intermediate_size, gate, first=first, fused=True)
        shared = None
        if w.has("shared_experts"):
            own = w.at("shared_experts")
            shared = dense(own, config.shared_intermediate_size, gate, first=first, fused=True)
        rule = replace(_rule(config), scale=float(config.routed_scaling_factor))
        return moe(w, rule, config.num_local_experts, config.intermediate_size, correction=CORRECTION, shared=shared)

    def lacks(self, config: Any) -> str:
        sparse = "minimax_m3_sparse" in config.layer_types
        apart = sparse and config.index_n_heads != config.num_key_value_heads
        return "an indexer of other groups of heads than share keys and values" if apart else ""
