"""Families whose decoders are built from blocks: one table entry each.

An entry says which blocks a family's layers are made of and what its config and its weights are called where that
differs from the usual. Sizes come from the config. A family without an entry, or a config that asks for what no block
computes, is run by transformers' own code (`generic.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tiermoe.model.attention import GroupedAttention, GroupedSizes
from tiermoe.model.decoder import Decoder, Layer
from tiermoe.model.delta import GatedDelta, LinearSizes
from tiermoe.model.feed_forward import ACTIVATIONS, DenseBlock, MoeBlock
from tiermoe.model.few_tokens import few_tokens_form
from tiermoe.model.indexer import Indexer, IndexerSizes
from tiermoe.model.latent import LatentAttention, LatentSizes
from tiermoe.model.linear import PlainLinear
from tiermoe.model.linear_attention import delta_sizes, gated_delta, is_linear
from tiermoe.model.norms import LayerNorm, Norm, RootMeanSquare
from tiermoe.model.rotary import TURNS, Rotary, knows_rotary, rotary_of, yarn_scale
from tiermoe.model.routers import Router, RouterRule
from tiermoe.model.weights import Weights


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
        wide=True,
        rounded=False,
        groups=config.n_group,
        kept_groups=config.topk_group,
        scale=float(config.routed_scaling_factor),
    )


def ernie_router(config: Any) -> RouterRule:
    """Softmax over all experts, of which a correction chooses; a token's weights sum to 1."""
    return RouterRule(config.num_experts_per_tok, normalise=True, wide=True)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family. block: the name of a layer's feed-forward part; gate: of the router in it; shared: of its shared
    expert; correction: of the bias by which its router chooses, relative to the block. window: 'none', 'all' layers, or
    by 'layer' as config.layer_types says. index_turn: how the queries and keys of an `Indexer` are turned; None: there
    is none. A layer that config.indexer_types calls shared takes what was chosen before it. late_norm, centred_norm:
    `RootMeanSquare`. gated: `GroupedAttention`. Layers that config.layer_types calls linear attention are
    `GatedDelta`."""

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
    scales: tuple[str, ...] = ()
    """Names of the config's multipliers that are in use (Granite)."""


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
    "gpt_oss": Architecture(chosen_router, gate="router", window="layer", late_norm=True),
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
    ),
    "glm_moe_dsa": Architecture(
        deepseek_v3_router,
        shared="shared_experts",
        correction="gate.e_score_correction_bias",
        latent=True,
        turn="pairs",
        index_turn="pairs",
    ),
}


def decoder_for(config: Any, weights: Weights, dtype: torch.dtype, kv_bits: int = 16) -> Decoder | None:
    """The decoder of a model with this transformers config; None where its family has none or the config asks for what
    the blocks do not compute. kv_bits: of keys and values in its caches; latents have 16 alone."""
    rotary = _rotary_for(config, dtype)
    if rotary is None:
        return None
    return _Builder(ARCHITECTURES[config.model_type], config, weights, dtype).decoder(rotary, kv_bits)


def decodes(config: Any) -> bool:
    """Whether `decoder_for` has a decoder for models with this config."""
    shared = (getattr(config, "indexer_types", None) or ["full"])[0] == "shared"  # with no layer before it
    computes = config.hidden_act in ACTIVATIONS and knows_rotary(config) and not shared
    return config.model_type in ARCHITECTURES and computes


def _rotary_for(config: Any, dtype: torch.dtype) -> Rotary | None:
    """The rotary embedding of a config that the blocks can compute; None for any other."""
    if not decodes(config):
        return None
    architecture = ARCHITECTURES[config.model_type]
    if architecture.latent:
        columns = config.qk_rope_head_dim
    else:
        columns = int(_head_columns(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))
    return rotary_of(config, columns, torch.float32 if architecture.turn == "complex" else dtype)


def _head_columns(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def attention_sizes(config: Any, has: Callable[[str], bool]) -> list[GroupedSizes | LatentSizes | LinearSizes] | None:
    """Of each layer of the decoder that a model with this config gets, what its attention asks memory for; None where
    it gets none of ours. has: whether the checkpoint holds a tensor of this name."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None or not decodes(config):
        return None
    if architecture.latent:
        indexer = None
        if architecture.index_turn is not None:
            indexer = IndexerSizes(config.index_n_heads, config.index_head_dim, config.index_topk)
        return [
            LatentSizes(
                config.num_attention_heads,
                config.qk_nope_head_dim,
                config.qk_rope_head_dim,
                config.v_head_dim,
                config.kv_lora_rank,
                indexer,
                _indexes(architecture, config, index),
            )
            for index in range(config.num_hidden_layers)
        ]
    return [
        LinearSizes(delta_sizes(config))
        if is_linear(config, index)
        else GroupedSizes(
            config.num_attention_heads,
            config.num_key_value_heads,
            _head_columns(config),
            _window(architecture, config, index),
            has(f"model.layers.{index}.self_attn.sinks"),
            architecture.gated,
        )
        for index in range(config.num_hidden_layers)
    ]


def _window(architecture: Architecture, config: Any, index: int) -> int | None:
    window = getattr(config, "sliding_window", None)
    slides = architecture.window == "all" or (
        architecture.window == "layer" and config.layer_types[index] == "sliding_attention"
    )
    return int(window) if window and slides else None


def _indexes(architecture: Architecture, config: Any, index: int) -> bool:
    """Whether a layer has an indexer of its own."""
    kinds = getattr(config, "indexer_types", None)
    return architecture.index_turn is not None and (kinds is None or kinds[index] == "full")


class _Builder:
    """Blocks from a table entry, a config and weights."""

    def __init__(self, architecture: Architecture, config: Any, weights: Weights, dtype: torch.dtype) -> None:
        self._of, self._config, self._weights, self._dtype = architecture, config, weights, dtype

    def decoder(self, rotary: Rotary, kv_bits: int) -> Decoder:
        weights = self._weights
        layers = [self._layer(index, rotary) for index in range(self._config.num_hidden_layers)]
        return Decoder(
            embedding=weights.embedding("model.embed_tokens"),
            layers=layers,
            norm=self._norm("model.norm"),
            head=weights.linear("lm_head"),
            rotary=rotary,
            dtype=self._dtype,
            embedding_scale=self._scale("embedding_multiplier"),
            logits_divisor=self._scale("logits_scaling"),
            kv_bits=kv_bits,
        )

    def _layer(self, index: int, rotary: Rotary) -> Layer:
        prefix = f"model.layers.{index}"
        attention = self._attention(prefix, index)
        before, after = (self._norm(f"{prefix}.{name}_layernorm") for name in ("input", "post_attention"))
        multiplier = self._scale("residual_multiplier")
        few = few_tokens_form(before, attention, after, rotary.columns, multiplier)
        indexer = self._indexer(f"{prefix}.self_attn") if _indexes(self._of, self._config, index) else None
        feed_forward = self._feed_forward(f"{prefix}.{self._of.block}")
        return Layer(before, attention, after, feed_forward, multiplier, few, indexer)

    def _attention(self, prefix: str, index: int) -> GroupedAttention | LatentAttention | GatedDelta:
        if is_linear(self._config, index):
            return gated_delta(self._config, self._weights, f"{prefix}.linear_attn")
        return self._latent(prefix, index) if self._of.latent else self._grouped(prefix, index)

    def _scale(self, name: str) -> float:
        return float(getattr(self._config, name)) if name in self._of.scales else 1.0

    def _norm(self, path: str, epsilon: float | None = None) -> Norm:
        weight = self._weights.tensor(f"{path}.weight")
        epsilon = float(self._config.rms_norm_eps) if epsilon is None else epsilon
        if self._of.layer_norm:
            return LayerNorm(weight, self._weights.tensor(f"{path}.bias"), epsilon)
        return RootMeanSquare(weight, epsilon, self._of.late_norm, self._of.centred_norm)

    def _grouped(self, prefix: str, index: int) -> GroupedAttention:
        config, weights, part = self._config, self._weights, f"{prefix}.self_attn"
        columns = _head_columns(config)
        normed = weights.has(f"{part}.q_norm")
        scale = self._scale("attention_multiplier") if self._of.scales else columns**-0.5
        clip = getattr(config, "clip_qkv", None)
        return GroupedAttention(
            query=weights.linear(f"{part}.q_proj"),
            key=weights.linear(f"{part}.k_proj"),
            value=weights.linear(f"{part}.v_proj"),
            output=weights.linear(f"{part}.o_proj"),
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            columns=columns,
            scale=scale,
            turn=TURNS[self._of.turn],
            query_norm=self._norm(f"{part}.q_norm") if normed else None,
            key_norm=self._norm(f"{part}.k_norm") if normed else None,
            norm_all_heads=self._of.norm_all_heads,
            window=_window(self._of, config, index),
            sinks=weights.tensor(f"{part}.sinks") if weights.has(f"{part}.sinks") else None,
            clip=None if clip is None else float(clip),
            gated=self._of.gated,
        )

    def _latent(self, prefix: str, index: int) -> LatentAttention:
        config, weights, part = self._config, self._weights, f"{prefix}.self_attn"
        plain, rotary = config.qk_nope_head_dim, config.qk_rope_head_dim
        narrow = config.q_lora_rank is not None
        asks = self._of.turn == "pairs" and self._of.index_turn is None
        interleaved = getattr(config, "rope_interleave", True) if asks else True
        return LatentAttention(
            query=weights.linear(f"{part}.q_b_proj" if narrow else f"{part}.q_proj"),
            narrow_query=weights.linear(f"{part}.q_a_proj") if narrow else None,
            query_norm=self._norm(f"{part}.q_a_layernorm", _NARROW_EPSILON) if narrow else None,
            compress=weights.linear(f"{part}.kv_a_proj_with_mqa"),
            latent_norm=self._norm(f"{part}.kv_a_layernorm", _NARROW_EPSILON),
            expand=weights.linear(f"{part}.kv_b_proj"),
            output=weights.linear(f"{part}.o_proj"),
            heads=config.num_attention_heads,
            plain_columns=plain,
            rotary_columns=rotary,
            value_columns=config.v_head_dim,
            latent_columns=config.kv_lora_rank,
            scale=yarn_scale(config.rope_parameters, (plain + rotary) ** -0.5),
            turn=TURNS[self._of.turn if interleaved else "halves"],
            index_columns=config.index_head_dim if _indexes(self._of, config, index) else 0,
        )

    def _indexer(self, part: str) -> Indexer:
        config, weights = self._config, self._weights
        weigh = weights.linear(f"{part}.indexer.weights_proj")
        norm = f"{part}.indexer.k_norm"
        return Indexer(
            narrow=weights.linear(f"{part}.q_a_proj"),
            narrow_norm=self._norm(f"{part}.q_a_layernorm", _NARROW_EPSILON),
            query=weights.linear(f"{part}.indexer.wq_b"),
            key=weights.linear(f"{part}.indexer.wk"),
            key_norm=LayerNorm(weights.tensor(f"{norm}.weight"), weights.tensor(f"{norm}.bias"), _NARROW_EPSILON),
            weigh=weigh,
            heads=config.index_n_heads,
            columns=config.index_head_dim,
            most=config.index_topk,
            turn=TURNS[self._of.index_turn or "halves"],
            weigh_in=weigh.packed.fields["weight"].dtype if isinstance(weigh, PlainLinear) else self._dtype,
        )

    def _feed_forward(self, part: str) -> MoeBlock | DenseBlock:
        weights, of = self._weights, self._of
        if not weights.has(f"{part}.{of.gate}.weight"):
            return self._dense(part)
        gate = f"{part}.{of.gate}"
        router = Router(
            weights.tensor(f"{gate}.weight"),
            of.router(self._config),
            weights.tensor(f"{gate}.bias") if weights.has(f"{gate}.bias") else None,
            weights.tensor(f"{part}.{of.correction}").flatten() if of.correction else None,
        )
        shared = self._dense(f"{part}.{of.shared}") if of.shared and weights.has(f"{part}.{of.shared}") else None
        return MoeBlock(router, shared, weights.linear(f"{part}.{of.shared_gate}") if of.shared_gate else None)

    def _dense(self, part: str) -> DenseBlock:
        gate, up, down = (self._weights.linear(f"{part}.{name}_proj") for name in ("gate", "up", "down"))
        return DenseBlock(gate, up, down, ACTIVATIONS[self._config.hidden_act])


_NARROW_EPSILON = 1e-6
"""Of the norms inside of latent attention, whatever the config says (transformers' default)."""
