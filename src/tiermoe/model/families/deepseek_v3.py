"""DeepSeek-V3 and R1, DeepSeek-V3.2: latent attention, in V3.2 to positions that an indexer chooses, a sigmoid router
with a correction that chooses within groups, shared experts. GLM-4.7-Flash has V3's layers."""

from __future__ import annotations

from typing import Any

from tiermoe.model.attention.indexer import IndexerSizes, indexer
from tiermoe.model.attention.latent import has_indexer, latent
from tiermoe.model.attention.linear import is_linear
from tiermoe.model.families.deepseek import part_with_shared_experts
from tiermoe.model.families.family import HeadFormat, LatentFamily
from tiermoe.model.layer import Layer
from tiermoe.model.moe import DenseBlock, MoeBlock
from tiermoe.model.rotary import ApplyRope, rope_halves, rope_pairs
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope

CORRECTION = "gate.e_score_correction_bias"


class DeepSeekV3(LatentFamily):
    name, model_type = "DeepSeek-V3", "deepseek_v3"
    mtp_head = HeadFormat()

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        return Layer(
            w.norm("input_layernorm"),
            latent(w.at("self_attn"), config, rope=rope_of(config)),
            w.norm("post_attention_layernorm"),
            v3_part(w.at("mlp"), config),
        )


class DeepSeekV32(LatentFamily):
    name, model_type = "DeepSeek-V3.2", "deepseek_v32"
    mtp_head = HeadFormat()

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        own, part = has_indexer(config, index), w.at("self_attn")
        return Layer(
            w.norm("input_layernorm"),
            latent(part, config, indexer=IndexerSizes.of(config), keeps_index=own),
            w.norm("post_attention_layernorm"),
            v3_part(w.at("mlp"), config),
            indexer=indexer(part, config) if own else None,
        )

    def lacks(self, config: Any) -> str:
        return indexer_lacks(config)


class Glm4MoeLite(DeepSeekV3):
    name, model_type = "GLM4-MoE-Lite", "glm4_moe_lite"


def v3_router(config: Any) -> RouterRule:
    """DeepSeek-V3's rule of routers (arXiv:2412.19437, section 2.1.2)."""
    return RouterRule(
        config.num_experts_per_tok,
        scores="sigmoid",
        normalise=bool(config.norm_topk_prob),
        epsilon=1e-20,
        wide=True,
        rounded=False,
        groups=config.n_group,
        kept_groups=config.topk_group,
        scale=float(config.routed_scaling_factor),
    )


def v3_part(w: Scope, config: Any) -> MoeBlock | DenseBlock:
    """DeepSeek-V3's feed-forward part."""
    return part_with_shared_experts(w, config, v3_router(config), CORRECTION)


def rope_of(config: Any) -> ApplyRope:
    """How latent attention without an indexer rotates."""
    return rope_pairs if getattr(config, "rope_interleave", True) else rope_halves


def indexer_lacks(config: Any) -> str:
    """`Family.lacks` of families with indexers in latent attention."""
    kinds = getattr(config, "indexer_types", None) or []
    for layer, kind in enumerate(kinds[: config.num_hidden_layers]):
        alone = layer == 0 or is_linear(config, layer - 1)
        if kind == "shared" and alone and not is_linear(config, layer):
            return "a layer that shares what an indexer chose, behind none that has it"
    whole = getattr(config, "index_kpool", None) is None or config.index_kpool_always_select_tail
    return "" if whole else "pools without the positions behind them"
