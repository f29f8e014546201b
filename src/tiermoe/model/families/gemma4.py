"""Gemma 4: dense blocks beside routed experts, routers that norm what they take, scaled embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.families.family import Family
from tiermoe.model.layer import Layer
from tiermoe.model.moe import DenseBlock, MoeBlock, add_to, dense, moe_layer
from tiermoe.model.norms import Norm
from tiermoe.model.routers import Router, RouterRule
from tiermoe.model.weights import NormKind, Scope


class Gemma4(Family):
    name, model_type = "Gemma 4", "gemma4_text"
    normalised = True
    scales_embedding = True
    norms = NormKind(late=True)

    def layer(self, w: Scope, config: Any, index: int) -> Layer:
        part = w.at("self_attn")
        attention = grouped(
            part,
            config,
            index,
            window=window_at(config, index),
            scale=1.0,
            norms=("q_norm", "k_norm"),
            norm_values=True,
            keys_are_values=not part.has("v_proj"),
        )
        return Layer(
            w.norm("input_layernorm"),
            attention,
            w.norm("pre_feedforward_layernorm"),
            side_by_side(w, config),
            norm_attended=w.norm("post_attention_layernorm"),
        )

    def lacks(self, config: Any) -> str:
        if config.hidden_size_per_layer_input:
            return "embeddings of each layer"
        if config.num_kv_shared_layers:
            return "layers that share keys and values"
        return "attention to later tokens" if config.use_bidirectional_attention == "all" else ""

    def embedding_scale(self, config: Any, dtype: torch.dtype) -> float:
        return float(torch.tensor(config.hidden_size**0.5).to(dtype))


def side_by_side(w: Scope, config: Any) -> SideBySide:
    """The feed-forward part of the layer at `w`."""
    experts = config.num_experts
    rule = RouterRule(config.top_k_experts, normalise=True, rounded=False)
    router = Router(
        w.tensor("router.proj.weight", experts, w.hidden),
        rule,
        prepared=NormedInput(w.norm_without_weight(w.hidden), w.tensor("router.scale", w.hidden), w.hidden**-0.5),
        expert_scale=w.tensor("router.per_expert_scale", experts),
    )
    return SideBySide(
        dense=dense(w.at("mlp"), config.intermediate_size, config.hidden_activation),
        moe=MoeBlock(router, layer=moe_layer(w, experts, rule.top_k, config.moe_intermediate_size, w.hidden)),
        norm_dense=w.norm("post_feedforward_layernorm_1"),
        norm_before_experts=w.norm("pre_feedforward_layernorm_2"),
        norm_experts=w.norm("post_feedforward_layernorm_2"),
        norm_sum=w.norm("post_feedforward_layernorm"),
        scale=w.number("layer_scalar"),
    )


@dataclass(frozen=True, slots=True)
class NormedInput:
    """Input of a router: hidden states normed without a weight, times scale (H) and root."""

    norm: Norm
    scale: Tensor
    root: float

    def __call__(self, hidden: Tensor) -> Tensor:
        """(T, H) → (T, H)."""
        return self.norm(hidden) * self.scale * self.root


@dataclass(frozen=True, slots=True)
class SideBySide:
    """A dense block beside routed experts. Router and experts take the residual stream."""

    dense: DenseBlock
    moe: MoeBlock
    norm_dense: Norm  # of the dense block's output
    norm_before_experts: Norm  # of the experts' input
    norm_experts: Norm  # of the experts' output
    norm_sum: Norm  # of both outputs' sum
    scale: float = 1.0  # of the layer's output

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's values do not depend on the other tokens of a call of up to FEW_TOKENS."""
        return self.dense.batch_invariant and self.moe.batch_invariant

    def watched(self, wrap: Callable[[Any], Any]) -> SideBySide:
        """The block with its dense block watched."""
        return replace(self, dense=self.dense.watched(wrap))

    def add(self, x: Tensor, residual: Tensor, multiplier: float) -> Tensor:
        """(residual + multiplier * both blocks) * scale; x: residual after the dense block's norm, (T, H) each."""
        (result,) = self.add_ragged([(x, residual)], multiplier)
        return result

    def add_ragged(self, parts: Sequence[tuple[Tensor, Tensor]], multiplier: float) -> list[Tensor]:
        """`add` of each (x, residual), bit for bit; each expert is read once for all of them."""
        experts, residuals = self.moe.experts, [residual for _, residual in parts]
        chosen = experts.route(self.moe.router, *residuals)
        given = [
            (self.norm_before_experts(residual), index, weights)
            for residual, (weights, index) in zip(residuals, chosen, strict=True)
        ]
        routed = experts.forward_ragged(given)
        return [self._sum(x, residual, output, multiplier) for (x, residual), output in zip(parts, routed, strict=True)]

    def _sum(self, x: Tensor, residual: Tensor, routed: Tensor, multiplier: float) -> Tensor:
        dense = self.norm_dense(self.dense(x))
        result = add_to(residual, self.norm_sum(dense + self.norm_experts(routed)), multiplier)
        return result if self.scale == 1 else result * self.scale
