"""Families whose decoders are built from blocks: one table entry each.

An entry says which blocks a family's layers are made of and what its config and its weights are called where that
differs from the usual. Sizes come from the config. A family without an entry, or a config that asks for what no block
computes, is run by transformers' own code (`generic.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from tiermoe.model.attention import GroupedAttention, GroupedSizes
from tiermoe.model.decoder import Attention, Decoder, Layer
from tiermoe.model.delta import LinearSizes
from tiermoe.model.feed_forward import ACTIVATIONS, DenseBlock, MoeBlock, SideBySide
from tiermoe.model.few_tokens import few_tokens_form
from tiermoe.model.indexer import Indexer, IndexerSizes
from tiermoe.model.latent import LatentAttention, LatentSizes
from tiermoe.model.linear import PlainLinear
from tiermoe.model.linear_attention import delta_sizes, gated_delta, is_linear
from tiermoe.model.norms import LayerNorm, Norm, RootMeanSquare
from tiermoe.model.rotary import TURNS, Rotary, knows_rotary, layer_kinds, rotary_of, yarn_scale
from tiermoe.model.routers import NormedInput, Router, RouterRule
from tiermoe.model.short_convolution import ConvolutionSizes, convolution_sizes, is_convolution, short_convolution
from tiermoe.model.weights import Weights, text_part


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


def decoder_for(config: Any, weights: Weights, dtype: torch.dtype, kv_bits: int = 16) -> Decoder | None:
    """The decoder of a model with this transformers config; None where its family has none or the config asks for what
    the blocks do not compute. kv_bits: of keys and values in its caches; latents have 16 alone."""
    if not decodes(config):
        return None
    return _Builder(ARCHITECTURES[config.model_type], config, text_part(weights), dtype).decoder(kv_bits)


def decodes(config: Any) -> bool:
    """Whether `decoder_for` has a decoder for models with this config."""
    return config.model_type in ARCHITECTURES and not not_computed(config)


def not_computed(config: Any) -> str:
    """What a config of a family in `ARCHITECTURES` asks for that no block computes, in words; empty: nothing."""
    of, name = ARCHITECTURES[config.model_type], _activation(config)
    if name not in ACTIVATIONS or not knows_rotary(config):
        kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "unknown")
        return f"{name}, rotary embedding '{kind}'"
    return "" if of.lacks is None else of.lacks(config)


def _activation(config: Any) -> str:
    """The name of what is between a dense block's matrices."""
    stated = ARCHITECTURES[config.model_type].activation
    return stated or str(getattr(config, "hidden_act", None) or config.hidden_activation)


def _rotaries(config: Any, dtype: torch.dtype) -> list[Rotary]:
    """The rotary embeddings of a config that the blocks compute, in the order of `layer_kinds`."""
    dtype = torch.float32 if ARCHITECTURES[config.model_type].turn == "complex" else dtype
    found = [rotary_of(config, _turned_columns(config, kind), dtype, kind) for kind in layer_kinds(config)]
    return [rotary for rotary in found if rotary is not None]


def _turned_columns(config: Any, kind: str | None) -> int:
    """Of a head, in layers of one of `layer_kinds`."""
    if ARCHITECTURES[config.model_type].latent:
        return int(config.qk_rope_head_dim)
    if kind is not None:
        return _head_columns(config.per_layer_config[kind])
    return int(_head_columns(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))


def _rotary_at(config: Any, index: int) -> int:
    """Which of `layer_kinds` layer `index` is of."""
    kinds = layer_kinds(config)
    return 0 if kinds == [None] else kinds.index(config.layer_types[index])


def _head_columns(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


AttentionSizes = GroupedSizes | LatentSizes | LinearSizes | ConvolutionSizes
"""Of one layer, what its attention, or what stands in its place, asks memory for."""


def attention_sizes(config: Any, has: Callable[[str], bool]) -> list[AttentionSizes] | None:
    """Of each layer of the decoder that a model with this config gets, what its attention asks memory for; None where
    it gets none of ours. has: whether the checkpoint holds a tensor of this name."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None or not decodes(config):
        return None
    if architecture.latent:
        return [_latent_sizes(architecture, config, index) for index in range(config.num_hidden_layers)]
    return [_layer_sizes(architecture, config, index, has) for index in range(config.num_hidden_layers)]


def _latent_sizes(architecture: Architecture, config: Any, index: int) -> LatentSizes:
    indexer = None
    if architecture.index_turn is not None:
        indexer = IndexerSizes(config.index_n_heads, config.index_head_dim, config.index_topk)
    return LatentSizes(
        config.num_attention_heads,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.kv_lora_rank,
        indexer,
        _indexes(architecture, config, index),
    )


def _layer_sizes(
    architecture: Architecture, config: Any, index: int, has: Callable[[str], bool]
) -> GroupedSizes | LinearSizes | ConvolutionSizes:
    if is_linear(config, index):
        return LinearSizes(delta_sizes(config))
    if is_convolution(config, index):
        return convolution_sizes(config)
    its = config.per_layer_config[index]
    return GroupedSizes(
        its.num_attention_heads,
        its.num_key_value_heads,
        _head_columns(its),
        _window(architecture, config, index),
        has(f"model.layers.{index}.self_attn.sinks"),
        architecture.gated,
        _rotary_at(config, index),
        not architecture.side_by_side,
    )


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

    def decoder(self, kv_bits: int) -> Decoder:
        rotaries = _rotaries(self._config, self._dtype)
        layers = [self._layer(index, rotaries) for index in range(self._config.num_hidden_layers)]
        table, embedding_scale = self._embedding()
        cap = getattr(self._config, "final_logit_softcapping", None)
        return Decoder(
            embedding=table,
            layers=layers,
            norm=self._norm(f"model.{self._named('norm')}"),
            head=self._weights.linear("lm_head"),
            rotaries=rotaries,
            dtype=self._dtype,
            embedding_scale=embedding_scale,
            logits_divisor=self._scale("logits_scaling"),
            kv_bits=kv_bits,
            softcap=None if cap is None else float(cap),
        )

    def _embedding(self) -> tuple[Callable[[Tensor], Tensor], float]:
        """The input embedding without its scale, which in transformers' model may be its own, and the scale."""
        path = "model.embed_tokens"
        if not self._of.scaled_embedding:
            return self._weights.embedding(path), self._scale("embedding_multiplier")
        weight = self._weights.tensor(f"{path}.weight")
        return partial(embedding, weight=weight), float(torch.tensor(self._config.hidden_size**0.5).to(weight.dtype))

    def _layer(self, index: int, rotaries: list[Rotary]) -> Layer:
        prefix = f"model.layers.{index}"
        attention = self._attention(prefix, index)
        before, after = (
            self._norm(f"{prefix}.{self._named(name)}") for name in ("input_layernorm", "post_attention_layernorm")
        )
        if self._of.side_by_side:
            attended = self._norm(f"{prefix}.post_attention_layernorm")
            return Layer(before, attention, after, self._side_by_side(prefix), norm_attended=attended)
        multiplier = self._scale("residual_multiplier")
        few = few_tokens_form(before, attention, after, rotaries[0].columns, multiplier)
        indexer = self._indexer(f"{prefix}.self_attn") if _indexes(self._of, self._config, index) else None
        feed_forward = self._feed_forward(f"{prefix}.{self._of.block}")
        return Layer(before, attention, after, feed_forward, multiplier, few, indexer)

    def _attention(self, prefix: str, index: int) -> Attention:
        if is_linear(self._config, index):
            return gated_delta(self._config, self._weights, f"{prefix}.linear_attn")
        if is_convolution(self._config, index):
            return short_convolution(self._weights, f"{prefix}.conv")
        return self._latent(prefix, index) if self._of.latent else self._grouped(prefix, index)

    def _named(self, name: str) -> str:
        """What the family calls a module."""
        return self._of.names.get(name, name)

    def _scale(self, name: str) -> float:
        return float(getattr(self._config, name)) if name in self._of.scales else 1.0

    def _norm(self, path: str, epsilon: float | None = None) -> Norm:
        weight = self._weights.tensor(f"{path}.weight")
        epsilon = float(getattr(self._config, self._of.epsilon)) if epsilon is None else epsilon
        if self._of.layer_norm:
            return LayerNorm(weight, self._weights.tensor(f"{path}.bias"), epsilon)
        return RootMeanSquare(weight, epsilon, self._of.late_norm, self._of.centred_norm, self._of.norm_by_kernel)

    def _plain_norm(self, columns: int) -> Norm:
        """Without weights."""
        epsilon = float(getattr(self._config, self._of.epsilon))
        return RootMeanSquare(torch.ones(columns, dtype=self._dtype), epsilon, late=True)

    def _grouped(self, prefix: str, index: int) -> GroupedAttention:
        config, weights, part = self._config, self._weights, f"{prefix}.self_attn"
        its = config.per_layer_config[index]
        columns = _head_columns(its)
        query_norm, key_norm = (f"{part}.{self._named(name)}" for name in ("q_norm", "k_norm"))
        normed = weights.has(query_norm)
        usual = self._of.attention_scale or columns**-0.5
        scale = self._scale("attention_multiplier") if self._of.scales else usual
        clip = getattr(config, "clip_qkv", None)
        return GroupedAttention(
            query=weights.linear(f"{part}.q_proj"),
            key=weights.linear(f"{part}.k_proj"),
            value=weights.linear(f"{part}.v_proj") if weights.has(f"{part}.v_proj") else None,
            output=weights.linear(f"{part}.{self._named('o_proj')}"),
            heads=its.num_attention_heads,
            kv_heads=its.num_key_value_heads,
            columns=columns,
            scale=scale,
            turn=TURNS[self._of.turn],
            query_norm=self._norm(query_norm) if normed else None,
            key_norm=self._norm(key_norm) if normed else None,
            norm_all_heads=self._of.norm_all_heads,
            window=_window(self._of, config, index),
            sinks=weights.tensor(f"{part}.sinks") if weights.has(f"{part}.sinks") else None,
            clip=None if clip is None else float(clip),
            gated=self._of.gated,
            value_norm=self._plain_norm(columns) if self._of.side_by_side else None,
            rotary=_rotary_at(config, index),
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
        gate, correction = f"{part}.{of.gate}", f"{part}.{of.correction}"
        router = Router(
            weights.tensor(f"{gate}.weight"),
            of.router(self._config),
            weights.tensor(f"{gate}.bias") if weights.has(f"{gate}.bias") else None,
            weights.tensor(correction).flatten() if of.correction and weights.has(correction) else None,
        )
        shared = self._dense(f"{part}.{of.shared}") if of.shared and weights.has(f"{part}.{of.shared}") else None
        return MoeBlock(router, shared, weights.linear(f"{part}.{of.shared_gate}") if of.shared_gate else None)

    def _side_by_side(self, prefix: str) -> SideBySide:
        weights, hidden = self._weights, int(self._config.hidden_size)
        router = Router(
            weights.tensor(f"{prefix}.router.proj.weight"),
            self._of.router(self._config),
            prepared=NormedInput(self._plain_norm(hidden), weights.tensor(f"{prefix}.router.scale"), hidden**-0.5),
            expert_scale=weights.tensor(f"{prefix}.router.per_expert_scale"),
        )
        return SideBySide(
            dense=self._dense(f"{prefix}.{self._of.block}"),
            moe=MoeBlock(router),
            norm_dense=self._norm(f"{prefix}.post_feedforward_layernorm_1"),
            norm_before_experts=self._norm(f"{prefix}.pre_feedforward_layernorm_2"),
            norm_experts=self._norm(f"{prefix}.post_feedforward_layernorm_2"),
            norm_sum=self._norm(f"{prefix}.post_feedforward_layernorm"),
            scale=float(weights.tensor(f"{prefix}.layer_scalar")),
        )

    def _dense(self, part: str) -> DenseBlock:
        names = (self._named(name) for name in ("gate_proj", "up_proj", "down_proj"))
        gate, up, down = (self._weights.linear(f"{part}.{name}") for name in names)
        return DenseBlock(gate, up, down, ACTIVATIONS[_activation(self._config)])


_NARROW_EPSILON = 1e-6
"""Of the norms inside of latent attention, whatever the config says (transformers' default)."""
