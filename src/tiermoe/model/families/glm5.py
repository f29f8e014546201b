"""GLM-5 and GLM-5 Next: DeepSeek-V3's layers with latent attention to positions that an indexer chooses. GLM-5 Next has
Kimi Delta Attention in most layers, residual streams, and a limited gate."""

from __future__ import annotations

from typing import Any

from collections.abc import Callable

from torch import Tensor

from tiermoe.model.attention.base import Attention
from tiermoe.model.attention.indexer import IndexerSizes, indexer
from tiermoe.model.attention.kimi_delta import kimi_delta
from tiermoe.model.attention.latent import has_indexer, latent
from tiermoe.model.attention.linear import is_linear
from tiermoe.model.attention.pool_indexer import PoolIndexerSizes, pool_indexer
from tiermoe.model.families.deepseek_v3 import CORRECTION, indexer_lacks, v3_part, v3_router
from tiermoe.model.families.deepseek_v4 import limited_silu
from tiermoe.model.families.family import HeadFormat, LatentFamily
from tiermoe.model.layer import Layer
from tiermoe.model.moe import DenseBlock, MoeBlock, dense, moe
from tiermoe.model.rotary import rope_pairs
from tiermoe.model.streams import MeanMixer, StreamLayer, balanced, balanced_mixer
from tiermoe.model.weights import Scope


class Glm5(LatentFamily):
    name, model_type = "GLM-MoE-DSA (GLM-5)", "glm_moe_dsa"
    mtp_head = HeadFormat(kinds={"indexer_types": "full"})

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        own, part = has_indexer(config, index), w.at("self_attn")
        return Layer(
            w.norm("input_layernorm"),
            latent(part, config, indexer=IndexerSizes.of(config), keeps_index=own),
            w.norm("post_attention_layernorm"),
            v3_part(w.at("mlp"), config),
            indexer=indexer(part, config, rope=rope_pairs) if own else None,
        )

    def lacks(self, config: Any) -> str:
        return indexer_lacks(config)


class Glm5Next(LatentFamily):
    name, model_type = "GLM-5 Next (GLM-5.3-Flash)", "glm5_next_text"
    in_streams = True

    def layer(self, w: Scope, config: Any, index: int) -> StreamLayer:
        part, chooses = w.at("self_attn"), None
        attention: Attention
        if is_linear(config, index):
            attention = kimi_delta(part, config)
        else:
            own = has_indexer(config, index)
            sizes = PoolIndexerSizes.of(config)
            attention = latent(part, config, narrow_epsilon=None, indexer=sizes, keeps_index=own)
            chooses = pool_indexer(part, config, narrow_epsilon=None) if own else None
        return StreamLayer(
            balanced(w.at("attn_hc"), config, w.norm("input_layernorm")),
            attention,
            balanced(w.at("ffn_hc"), config, w.norm("post_attention_layernorm")),
            limited_part(w.at("mlp"), config),
            chooses,
        )

    def lacks(self, config: Any) -> str:
        return indexer_lacks(config)

    def end(self, w: Scope, config: Any) -> Callable[[Tensor], Tensor]:
        norm = w.norm("model.norm")
        return balanced_mixer(w.at("model.hc_head"), config, norm) if w.has("model.hc_head.hc_fn") else MeanMixer(norm)


def limited_part(w: Scope, config: Any) -> MoeBlock | DenseBlock:
    """DeepSeek-V3's feed-forward part with a limited gate."""
    gate, inner = limited_silu(config), config.moe_intermediate_size
    if not w.has("gate.weight"):
        return dense(w, config.intermediate_size, gate)
    shared = dense(w.at("shared_experts"), config.n_shared_experts * inner, gate) if w.has("shared_experts") else None
    return moe(w, v3_router(config), config.n_routed_experts, inner, correction=CORRECTION, shared=shared)
