"""DeepSeek-V3 and R1, DeepSeek-V3.2: latent attention, in V3.2 to positions that an indexer chooses, a sigmoid router
with a correction that chooses within groups, shared experts. GLM-4.7-Flash has V3's layers, and A.X-K1 has a norm after
their feed-forward part."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.indexers import IndexerSizes, indexer
from tiermoe.model.attention.latent import has_indexer, latent
from tiermoe.model.attention.linear import is_linear
from tiermoe.model.families.family import HeadFormat, LatentFamily
from tiermoe.model.families.gguf import LATENT, SIGMOID, SOFTMAX, Config, Gguf, block_names, latent_fields
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import DenseBlock, MoeBlock, moe_or_dense
from tiermoe.model.parts import Norm
from tiermoe.model.rotary import ApplyRope, rope_halves, rope_pairs
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Scope

INDEXER = {
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.k_norm": "self_attn.indexer.k_norm",
}
"""Tensors of a layer's indexer → modules, beside the usual ones."""
CORRECTION = "gate.e_score_correction_bias"
SHARED_NAMES = block_names(shared="shared_experts", correction=CORRECTION)
"""Tensors of a block → modules of a layer, of families with DeepSeek-V3's feed-forward part."""
V3_NAMES = SHARED_NAMES | LATENT


class DeepSeekV3(LatentFamily):
    name, model_type = "DeepSeek-V3", "deepseek_v3"
    on_gpu = True
    gguf = Gguf(("deepseek2",), V3_NAMES)
    mtp_head = HeadFormat()

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        return Layer(
            w.norm("input_layernorm"),
            latent(w.at("self_attn"), config, rope=rope_of(config)),
            w.norm("post_attention_layernorm"),
            v3_part(w.at("mlp"), config),
        )

    def config(self, file: GgufFile) -> Config:
        corrected = any(name.endswith("exp_probs_b.bias") for name in file.tensors)  # no DeepSeek-V2 is
        sigmoid = file.count("expert_gating_func", SIGMOID if corrected else SOFTMAX) == SIGMOID
        config = latent_fields(file)
        if sigmoid:
            return config
        if config["norm_topk_prob"]:
            raise ModelError(f"{file.path} scales a softmax router's weights to a fixed sum, which no DeepSeek-V2 does")
        return {
            **config,
            "model_type": "deepseek_v2",
            "topk_method": "group_limited_greedy" if config["n_group"] > 1 else "greedy",
        }


class DeepSeekV32(LatentFamily):
    name, model_type = "DeepSeek-V3.2", "deepseek_v32"
    gguf = Gguf(("deepseek32",), V3_NAMES | INDEXER)
    mtp_head = HeadFormat()

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        own, part = has_indexer(config, index), w.at("self_attn")
        return Layer(
            w.norm("input_layernorm"),
            latent(part, config, indexer=IndexerSizes.of(config), keeps_index=own),
            w.norm("post_attention_layernorm"),
            v3_part(w.at("mlp"), config),
            indexer=indexer(part, config) if own else None,
        )

    def lacks(self, config: ModelConfig) -> str:
        return indexer_lacks(config)

    def config(self, file: GgufFile) -> Config:
        """ModelError where a layer lacks a tensor of its indexer."""
        return indexed_fields(file, [True] * file.layers)


class Glm4MoeLite(DeepSeekV3):
    name, model_type = "GLM4-MoE-Lite", "glm4_moe_lite"


class AxK1(LatentFamily):
    name, model_type = "A.X-K1", "axk1"
    on_gpu = True

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        part = w.at("mlp")
        return Layer(
            w.norm("input_layernorm"),
            latent(w.at("self_attn"), config, rope=rope_of(config)),
            w.norm("post_attention_layernorm"),
            v3_part(part, config, norm=part.norm("post_mlp_layernorm") if part.has("post_mlp_layernorm") else None),
        )


def v3_router(config: ModelConfig) -> RouterRule:
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


def v3_part(
    w: Scope, config: ModelConfig, activation: Callable[..., Tensor] | None = None, norm: Norm | None = None
) -> MoeBlock | DenseBlock:
    """DeepSeek-V3's feed-forward part. activation, norm: as of `moe_or_dense`."""
    experts, shared, rule = config.n_routed_experts, config.n_shared_experts, v3_router(config)
    return moe_or_dense(
        w, config, rule, experts, shared=shared, activation=activation, correction=CORRECTION, norm=norm
    )


def rope_of(config: ModelConfig) -> ApplyRope:
    """How latent attention without an indexer rotates."""
    return rope_pairs if getattr(config, "rope_interleave", True) else rope_halves


def indexer_lacks(config: ModelConfig) -> str:
    """`Family.lacks` of families with indexers in latent attention."""
    kinds = getattr(config, "indexer_types", None) or []
    for layer, kind in enumerate(kinds[: config.num_hidden_layers]):
        alone = layer == 0 or is_linear(config, layer - 1)
        if kind == "shared" and alone and not is_linear(config, layer):
            return "a layer that shares what an indexer chose, behind none that has it"
    whole = getattr(config, "index_kpool", None) is None or config.index_kpool_always_select_tail
    return "" if whole else "pools without the positions behind them"


def indexed_fields(file: GgufFile, full: list[bool]) -> Config:
    """A model with indexers in latent attention. full: which layers have one."""
    for layer in (layer for layer, each in enumerate(full) if each):
        for name in INDEXER:
            file.shape(f"blk.{layer}.{name}.weight", 1 if name.endswith("norm") else 2)
        file.shape(f"blk.{layer}.indexer.k_norm.bias", 1)
    if (score := file.count("expert_gating_func", SIGMOID)) != SIGMOID:
        raise file.refusal(f"has routers that score by function {score}, not by sigmoid ({SIGMOID})")
    return {**latent_fields(file), "q_lora_rank": file.count("attention.q_lora_rank", least=1), **indexer_sizes(file)}


def indexer_sizes(file: GgufFile) -> Config:
    """The fields of an indexer."""
    return {
        "index_n_heads": file.count("attention.indexer.head_count", least=1),
        "index_head_dim": file.count("attention.indexer.key_length", least=1),
        "index_topk": file.count("attention.indexer.top_k", least=1),
    }


def full_layers(file: GgufFile, otherwise: list[bool] | None = None) -> list[bool]:
    """Which layers have an indexer. otherwise: those of a file that does not say it. ModelError where it says it of
    fewer layers, or not and there is no `otherwise`."""
    what = f"which of its {file.layers} layers have an indexer"
    return [bool(each) for each in file.of_layers("attention.indexer.types", what, otherwise)]


def indexer_types(full: list[bool]) -> list[str]:
    """transformers' names of layers that have an indexer, and of those that take the choice of the layer before."""
    return ["full" if each else "shared" for each in full]
