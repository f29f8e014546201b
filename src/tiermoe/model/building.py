"""A family's decoder, put together from blocks as its entry in `architectures.py` says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from tiermoe.model.architectures import ARCHITECTURES, Architecture, activation_of, decodes
from tiermoe.model.attention import GroupedAttention
from tiermoe.model.decoder import Attention, Decoder, Layer
from tiermoe.model.feed_forward import ACTIVATIONS, DenseBlock, MoeBlock, SideBySide
from tiermoe.model.few_tokens import few_tokens_form
from tiermoe.model.indexer import Indexer
from tiermoe.model.latent import LatentAttention
from tiermoe.model.layer_sizes import has_indexer, head_columns, rotary_at, turned_columns, window_of
from tiermoe.model.linear import PlainLinear
from tiermoe.model.linear_attention import gated_delta, is_linear
from tiermoe.model.norms import LayerNorm, Norm, RootMeanSquare
from tiermoe.model.rotary import TURNS, Rotary, layer_kinds, rotary_of, yarn_scale
from tiermoe.model.routers import NormedInput, Router
from tiermoe.model.short_convolution import is_convolution, short_convolution
from tiermoe.model.weights import Weights, text_part

_NARROW_EPSILON = 1e-6
"""Of the norms inside of latent attention, whatever the config says (transformers' default)."""


def decoder_for(config: Any, weights: Weights, dtype: torch.dtype, kv_bits: int = 16) -> Decoder | None:
    """The decoder of a model with this transformers config; None where its family has none or the config asks for what
    the blocks do not compute. kv_bits: of keys and values in its caches; latents have 16 alone."""
    if not decodes(config):
        return None
    return _Builder(ARCHITECTURES[config.model_type], config, text_part(weights), dtype).decoder(kv_bits)


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
        indexer = self._indexer(f"{prefix}.self_attn") if has_indexer(self._of, self._config, index) else None
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
        columns = head_columns(its)
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
            window=window_of(self._of, config, index),
            sinks=weights.tensor(f"{part}.sinks") if weights.has(f"{part}.sinks") else None,
            clip=None if clip is None else float(clip),
            gated=self._of.gated,
            value_norm=self._plain_norm(columns) if self._of.side_by_side else None,
            rotary=rotary_at(config, index),
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
            index_columns=config.index_head_dim if has_indexer(self._of, config, index) else 0,
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
        return DenseBlock(gate, up, down, ACTIVATIONS[activation_of(self._config)])


def _rotaries(config: Any, dtype: torch.dtype) -> list[Rotary]:
    """The rotary embeddings of a config that the blocks compute, in the order of `layer_kinds`."""
    dtype = torch.float32 if ARCHITECTURES[config.model_type].turn == "complex" else dtype
    found = [rotary_of(config, turned_columns(config, kind), dtype, kind) for kind in layer_kinds(config)]
    return [rotary for rotary in found if rotary is not None]
