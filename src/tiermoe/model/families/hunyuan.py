"""Hunyuan: A13B, Hunyuan 3, and Hunyuan 4 with latent attention that an indexer leads and independent residual
streams."""

from __future__ import annotations

from typing import Any

from collections.abc import Callable

from torch import Tensor

from tiermoe.model.attention.grouped import grouped
from tiermoe.model.attention.indexer import IndexerSizes, indexer
from tiermoe.model.attention.latent import has_indexer, latent
from tiermoe.model.families.deepseek_v3 import indexer_lacks, v3_part
from tiermoe.model.families.family import Family, HeadFormat, LatentFamily
from tiermoe.model.layer import Layer
from tiermoe.model.moe import DenseBlock, MoeBlock, dense, moe
from tiermoe.model.rotary import rope_halves
from tiermoe.model.routers import RouterRule
from tiermoe.model.streams import MeanMixer, StreamLayer, balanced, balanced_mixer
from tiermoe.model.weights import Scope


class HunyuanV1(Family):
    """Norms of queries and keys come after the rotary embedding."""

    name, model_type = "Hunyuan (A13B)", "hunyuan_v1_moe"
    normalised = True

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        norms = ("query_layernorm", "key_layernorm")
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, norms=norms, norms_rotated=True),
            w.norm("post_attention_layernorm"),
            self.part(w.at("mlp"), config),
        )

    def part(self, w: Scope, config: Any) -> MoeBlock | DenseBlock:
        """The feed-forward part: dense in the layers that have no router."""
        inner = config.intermediate_size
        if not w.has("gate.wg.weight"):
            return dense(w, inner, config.hidden_act)
        rule = RouterRule(used(config)[0], normalise=True, wide=True, rounded=False)
        shared = dense(w.at("shared_mlp"), inner, config.hidden_act) if w.has("shared_mlp") else None
        return moe(w, rule, config.num_experts, inner, router="gate.wg", shared=shared)

    def lacks(self, config: Any) -> str:
        return "" if len(set(used(config))) == 1 else "layers that use different numbers of experts"


def used(config: Any) -> list[int]:
    """Experts of a token, one number for all layers or one for each."""
    return config.moe_topk if isinstance(config.moe_topk, list) else [config.moe_topk]


class HunyuanV3(Family):
    name, model_type = "Hunyuan 3", "hy_v3"
    normalised = True
    mtp_head = HeadFormat({"model.layers.{}.final_layernorm.": "shared_head.norm."})

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        return Layer(
            w.norm("input_layernorm"),
            grouped(w.at("self_attn"), config, index, norms=("q_norm", "k_norm")),
            w.norm("post_attention_layernorm"),
            self.part(w.at("mlp"), config),
        )

    def part(self, w: Scope, config: Any) -> MoeBlock | DenseBlock:
        """The feed-forward part: dense in the layers that have no router."""
        if not w.has("gate.weight"):
            return dense(w, config.intermediate_size, config.hidden_act)
        rule = RouterRule(
            config.num_experts_per_tok,
            scores="sigmoid",
            normalise=True,
            epsilon=1e-20,
            wide=True,
            rounded=False,
            scale=float(config.router_scaling_factor),
        )
        inner, shared = config.moe_intermediate_size, None
        if w.has("shared_experts"):
            shared = dense(w.at("shared_experts"), config.num_shared_experts * inner, config.hidden_act)
        return moe(w, rule, config.num_experts, inner, correction="e_score_correction_bias", shared=shared)


class HunyuanV4(LatentFamily):
    name, model_type = "Hunyuan 4", "hy_v4"
    in_streams = True

    def layer(self, w: Scope, config: Any, index: int) -> StreamLayer:
        own, part = has_indexer(config, index), w.at("self_attn")
        attention = latent(
            part,
            config,
            rope=rope_halves,
            gate="gate_proj",
            gate_columns=config.num_attention_heads * config.v_head_dim,
            sinks=True,
            indexer=IndexerSizes.of(config),
            keeps_index=own,
        )
        return StreamLayer(
            balanced(w.at("attn_hc"), config, w.norm("input_layernorm")),
            attention,
            balanced(w.at("ffn_hc"), config, w.norm("post_attention_layernorm")),
            v3_part(w.at("mlp"), config),
            indexer(part, config, rotates_last=True, key_epsilon=None) if own else None,
        )

    def lacks(self, config: Any) -> str:
        return indexer_lacks(config)

    def end(self, w: Scope, config: Any) -> Callable[[Tensor], Tensor]:
        norm = w.norm("model.norm")
        return balanced_mixer(w.at("model.hc_head"), config, norm) if w.has("model.hc_head.hc_fn") else MeanMixer(norm)
