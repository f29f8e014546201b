"""Gemma 4: dense blocks beside routed experts, routers that norm what they take, scaled embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tiermoe.model.architecture import Architecture, FamilyWeights
from tiermoe.model.moe import DenseBlock, MoeBlock, add_to
from tiermoe.model.norms import Norm
from tiermoe.model.routers import Router, RouterRule


def gemma4_router(config: Any) -> RouterRule:
    return RouterRule(config.top_k_experts, normalise=True, rounded=False)


def gemma4_lacks(config: Any) -> str:
    """The parts of a config that the models with experts lack; empty: none."""
    if config.hidden_size_per_layer_input:
        return "embeddings of each layer"
    if config.num_kv_shared_layers:
        return "layers that share keys and values"
    return "attention to later tokens" if config.use_bidirectional_attention == "all" else ""


GEMMA4 = Architecture(
    gemma4_router,
    window="layer",
    late_norm=True,
    norm_attended="post_attention_layernorm",
    names={"post_attention_layernorm": "pre_feedforward_layernorm"},
    attention_scale=1.0,
    scaled_embedding=True,
    side_by_side=True,
    lacks=gemma4_lacks,
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

    @classmethod
    def of(cls, weights: FamilyWeights, layer: str, activation: str) -> SideBySide:
        """The block of the layer at the path `layer`. activation: of the dense block."""
        hidden = int(weights.config.hidden_size)
        normed = NormedInput(weights.norm_without_weight(hidden), weights.tensor(f"{layer}.router.scale"), hidden**-0.5)
        router = Router(
            weights.tensor(f"{layer}.router.proj.weight"),
            weights.architecture.router(weights.config),
            prepared=normed,
            expert_scale=weights.tensor(f"{layer}.router.per_expert_scale"),
        )
        return cls(
            dense=DenseBlock.of(weights, f"{layer}.{weights.architecture.block}", activation),
            moe=MoeBlock(router),
            norm_dense=weights.norm(f"{layer}.post_feedforward_layernorm_1"),
            norm_before_experts=weights.norm(f"{layer}.pre_feedforward_layernorm_2"),
            norm_experts=weights.norm(f"{layer}.post_feedforward_layernorm_2"),
            norm_sum=weights.norm(f"{layer}.post_feedforward_layernorm"),
            scale=float(weights.tensor(f"{layer}.layer_scalar")),
        )

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
