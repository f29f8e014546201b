"""Families whose decoders are built from blocks: one table entry each.

An entry says which blocks a family's layers are made of and what its config and its weights are called where that
differs from the usual. Sizes come from the config (`layer_sizes.py`); `building.py` puts the blocks together. A family
without an entry, or a config that asks for what no block computes, is run by transformers' own code (`generic.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tiermoe.model.feed_forward import ACTIVATIONS
from tiermoe.model.rotary import knows_rotary
from tiermoe.model.routers import RouterRule


def softmax_router(config: Any) -> RouterRule:
    """Softmax over all experts; a token's weights may sum to 1."""
    return RouterRule(config.num_experts_per_tok, normalise=bool(getattr(config, "norm_topk_prob", False)))


def normalising_router(config: Any) -> RouterRule:
    """Softmax over all experts; a token's weights sum to 1, whatever the config says."""
    return RouterRule(config.num_experts_per_tok, normalise=True)


def mixtral_router(config: Any) -> RouterRule:
    return RouterRule(config.num_experts_per_tok, normalise=True, rounded=False)


def chosen_router(config: Any) -> RouterRule:
    """Softmax over the chosen experts alone."""
    return RouterRule(config.num_experts_per_tok, scores="chosen")


def phi_router(config: Any) -> RouterRule:
    return RouterRule(2, scores="sparsemixer", jitter=float(config.router_jitter_noise))


def minimax_router(config: Any) -> RouterRule:
    return RouterRule(config.num_experts_per_tok, scores="sigmoid", normalise=True, rounded=False)


def deepseek_v2_router(config: Any) -> RouterRule:
    grouped = config.topk_method == "group_limited_greedy"
    return RouterRule(
        config.num_experts_per_tok,
        wide=True,
        rounded=False,
        groups=config.n_group if grouped else 1,
        kept_groups=config.topk_group if grouped else 1,
        best_of_group=True,
        scale=float(config.routed_scaling_factor),
    )


def deepseek_v3_router(config: Any) -> RouterRule:
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


def ernie_router(config: Any) -> RouterRule:
    """Softmax over all experts, of which a correction chooses; a token's weights sum to 1."""
    return RouterRule(config.num_experts_per_tok, normalise=True, epsilon=1e-20, wide=True)


def lfm2_router(config: Any) -> RouterRule:
    return RouterRule(
        config.num_experts_per_tok,
        scores="sigmoid",
        normalise=bool(config.norm_topk_prob),
        epsilon=1e-6,
        scale=float(config.routed_scaling_factor),
    )


def gemma4_router(config: Any) -> RouterRule:
    return RouterRule(config.top_k_experts, normalise=True, rounded=False)


def gemma4_lacks(config: Any) -> str:
    """What a config of Gemma 4 asks for that is not in its models with experts; empty: nothing."""
    if config.hidden_size_per_layer_input:
        return "embeddings of each layer"
    if config.num_kv_shared_layers:
        return "layers that share keys and values"
    return "attention to later tokens" if config.use_bidirectional_attention == "all" else ""


def indexer_lacks(config: Any) -> str:
    """What a config of a family with indexers asks for that cannot be computed; empty: nothing."""
    first, *_ = getattr(config, "indexer_types", None) or ["full"]
    return "a first layer that shares what an indexer chose before it" if first == "shared" else ""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family. block: the name of a layer's feed-forward part; gate: of the router in it; shared: of its shared
    expert; correction: of the bias by which its router chooses, relative to the block. window: 'none', 'all' layers, or
    by 'layer' as config.layer_types says. index_turn: how the queries and keys of an `Indexer` are turned; None: there
    is none. A layer that config.indexer_types calls shared takes what was chosen before it. late_norm, centred_norm:
    `RootMeanSquare`. gated: `GroupedAttention`. names: of weights that are called otherwise than usual. epsilon: the
    config's name for that of norms. activation: where the config has none. attention_scale: where it does not follow
    from a head's columns. scaled_embedding: by the root of the hidden size. norm_by_kernel: `RootMeanSquare`.
    side_by_side: dense blocks beside experts, and a norm of what attention gives (`SideBySide`). lacks: what of a
    config no block computes, in words. Layers that config.layer_types calls linear attention are `GatedDelta`, those
    that it calls conv `ShortConvolution`."""

    router: Callable[[Any], RouterRule]
    block: str = "mlp"
    gate: str = "gate"
    shared: str | None = None
    shared_gate: str | None = None
    correction: str | None = None
    window: str = "none"
    latent: bool = False
    turn: str = "halves"
    layer_norm: bool = False
    late_norm: bool = False
    centred_norm: bool = False
    gated: bool = False
    norm_all_heads: bool = False
    index_turn: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    epsilon: str = "rms_norm_eps"
    activation: str | None = None
    attention_scale: float | None = None
    scaled_embedding: bool = False
    norm_by_kernel: bool = True
    side_by_side: bool = False
    lacks: Callable[[Any], str] | None = None
    scales: tuple[str, ...] = ()
    """Names of the config's multipliers that are in use (Granite)."""


_LFM2_NAMES = {
    "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm", "norm": "embedding_norm",
    "o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm",
    "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
}  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {
    "mixtral": Architecture(mixtral_router, window="all"),
    "qwen2_moe": Architecture(softmax_router, shared="shared_expert", shared_gate="shared_expert_gate", window="layer"),
    "qwen3_moe": Architecture(softmax_router, window="all"),
    "qwen3_next": Architecture(
        softmax_router, shared="shared_expert", shared_gate="shared_expert_gate", centred_norm=True, gated=True
    ),
    "qwen3_5_moe_text": Architecture(
        normalising_router, shared="shared_expert", shared_gate="shared_expert_gate", centred_norm=True, gated=True
    ),
    "olmoe": Architecture(softmax_router, norm_all_heads=True),
    "phimoe": Architecture(phi_router, gate="router", layer_norm=True, window="all"),
    "granitemoe": Architecture(
        chosen_router,
        block="block_sparse_moe",
        gate="router",
        scales=("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    ),
    "glm4_moe": Architecture(deepseek_v3_router, shared="shared_experts", correction="gate.e_score_correction_bias"),
    "glm4_moe_lite": Architecture(
        deepseek_v3_router,
        shared="shared_experts",
        correction="gate.e_score_correction_bias",
        latent=True,
        turn="pairs",
    ),
    "ernie4_5_moe": Architecture(
        ernie_router,
        shared="shared_experts",
        correction="gate.moe_statics.e_score_correction_bias",
        turn="complex",
    ),
    "dots1": Architecture(
        deepseek_v3_router,
        shared="shared_experts",
        correction="gate.e_score_correction_bias",
        window="layer",
    ),
    "minimax_m2": Architecture(minimax_router, correction="e_score_correction_bias", norm_all_heads=True),
    "gemma4_text": Architecture(
        gemma4_router,
        window="layer",
        late_norm=True,
        names={"post_attention_layernorm": "pre_feedforward_layernorm"},
        attention_scale=1.0,
        scaled_embedding=True,
        side_by_side=True,
        lacks=gemma4_lacks,
    ),
    "gpt_oss": Architecture(chosen_router, gate="router", window="layer", late_norm=True, norm_by_kernel=False),
    "lfm2_moe": Architecture(
        lfm2_router,
        block="feed_forward",
        correction="expert_bias",
        names=_LFM2_NAMES,
        epsilon="norm_eps",
        activation="silu",
    ),
    "deepseek_v2": Architecture(deepseek_v2_router, shared="shared_experts", latent=True, turn="complex"),
    "deepseek_v3": Architecture(
        deepseek_v3_router,
        shared="shared_experts",
        correction="gate.e_score_correction_bias",
        latent=True,
        turn="pairs",
    ),
    "deepseek_v32": Architecture(
        deepseek_v3_router,
        shared="shared_experts",
        correction="gate.e_score_correction_bias",
        latent=True,
        turn="pairs",
        index_turn="halves",
        lacks=indexer_lacks,
    ),
    "glm_moe_dsa": Architecture(
        deepseek_v3_router,
        shared="shared_experts",
        correction="gate.e_score_correction_bias",
        latent=True,
        turn="pairs",
        index_turn="pairs",
        lacks=indexer_lacks,
    ),
}


def decodes(config: Any) -> bool:
    """Whether `decoder_for` has a decoder for models with this config."""
    return config.model_type in ARCHITECTURES and not not_computed(config)


def not_computed(config: Any) -> str:
    """What a config of a family in `ARCHITECTURES` asks for that no block computes, in words; empty: nothing."""
    of, name = ARCHITECTURES[config.model_type], activation_of(config)
    if name not in ACTIVATIONS or not knows_rotary(config):
        kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "unknown")
        return f"{name}, rotary embedding '{kind}'"
    return "" if of.lacks is None else of.lacks(config)


def activation_of(config: Any) -> str:
    """The name of what is between a dense block's matrices."""
    stated = ARCHITECTURES[config.model_type].activation
    return stated or str(getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None))
