"""What follows attention in a layer: a dense gated block, or a router with experts and perhaps a shared one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.kernels.gates import gelu_tanh
from tiermoe.model.linear import Linear
from tiermoe.model.norms import Norm
from tiermoe.model.routers import Router

Activation = Callable[[Tensor], Tensor]


class Experts(Protocol):
    """A MoE layer's experts, wherever they lie. by_row: a token's result does not depend on the others of a call of few
    tokens."""

    @property
    def by_row(self) -> bool: ...

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """hidden (T, H), index (T, K) of the chosen experts, weights (T, K) → (T, H)."""
        ...

    def apart(self, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        """What a call with each part's hidden, index and weights gives, bit for bit; each expert comes once for all."""
        ...

    def block(self, router: Router, hidden: Tensor, residual: Tensor | None) -> Tensor | None:
        """residual, if any, + what the router chooses for hidden, (T, H) each, in one call; None where that cannot
        be."""
        ...

    def route(self, router: Router, *parts: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each part's hidden (T, H) → its weights (T, K) and experts (T, K) that run: the router's choice, or one that
        is made of its scores. All parts of a step come in one call."""
        ...


class NoExperts:
    """Stands where experts are not attached."""

    by_row = False

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        raise RuntimeError("this decoder's experts are not attached")

    def apart(self, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        return [self(*part) for part in parts]

    def block(self, router: Router, hidden: Tensor, residual: Tensor | None) -> Tensor | None:
        return None

    def route(self, router: Router, *parts: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [router.route(hidden) for hidden in parts]


@dataclass(frozen=True, slots=True)
class DenseBlock:
    """down(activation(gate x) * up x)."""

    gate: Linear
    up: Linear
    down: Linear
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        """(T, H) → (T, H)."""
        return self.down(self.activation(self.gate(x)) * self.up(x))

    @property
    def moe(self) -> MoeBlock | None:
        """Its routed experts: none."""
        return None

    @property
    def by_row(self) -> bool:
        """Whether a token's values do not depend on the others of a call of few tokens."""
        return self.gate.by_row and self.up.by_row and self.down.by_row

    def watched(self, wrap: Callable[[Any], Any]) -> DenseBlock:
        """The block with wrap(part) in the place of its matrices."""
        return replace(self, gate=wrap(self.gate), up=wrap(self.up), down=wrap(self.down))

    def add(self, x: Tensor, residual: Tensor, multiplier: float) -> Tensor:
        """residual + multiplier * the block of x."""
        return _added(residual, self(x), multiplier)

    def add_apart(self, parts: Sequence[tuple[Tensor, Tensor]], multiplier: float) -> list[Tensor]:
        """`add` of each (x, residual)."""
        return [self.add(x, residual, multiplier) for x, residual in parts]


@dataclass(slots=True)
class MoeBlock:
    """The routed experts of a token and, for every token, a shared expert.

    shared_gate: hidden → (T, 1), by whose sigmoid the shared expert's output is scaled (Qwen2-MoE)."""

    router: Router
    shared: DenseBlock | None = None
    shared_gate: Linear | None = None
    experts: Experts = field(default_factory=NoExperts)

    @property
    def moe(self) -> MoeBlock:
        """Its routed experts."""
        return self

    @property
    def by_row(self) -> bool:
        """Whether a token's values do not depend on the others of a call of few tokens."""
        always = [part for part in (self.shared, self.shared_gate) if part is not None]
        return self.router.native is not None and self.experts.by_row and all(part.by_row for part in always)

    def watched(self, wrap: Callable[[Any], Any]) -> MoeBlock:
        """The block with its shared expert watched."""
        return self if self.shared is None else replace(self, shared=self.shared.watched(wrap))

    def add(self, x: Tensor, residual: Tensor, multiplier: float) -> Tensor:
        """residual + multiplier * the block of x, (T, H) each."""
        plain = self.shared is None and multiplier == 1
        result = self.experts.block(self.router, x, residual if plain else None)
        if result is None:
            ((weights, index),) = self.experts.route(self.router, x)
            result = self.experts(x, index, weights)
        elif plain:
            return result
        return _added(residual, self._with_shared(x, result), multiplier)

    def add_apart(self, parts: Sequence[tuple[Tensor, Tensor]], multiplier: float) -> list[Tensor]:
        """`add` of each (x, residual), bit for bit; each expert comes once for all of them."""
        xs = [x for x, _ in parts]
        chosen = self.experts.route(self.router, *xs)
        routed = self.experts.apart([(x, index, weights) for x, (weights, index) in zip(xs, chosen, strict=True)])
        return [
            _added(residual, self._with_shared(x, result), multiplier)
            for (x, residual), result in zip(parts, routed, strict=True)
        ]

    def _with_shared(self, x: Tensor, routed: Tensor) -> Tensor:
        if self.shared is None:
            return routed
        always = self.shared(x)
        if self.shared_gate is not None:
            always = torch.sigmoid(self.shared_gate(x)) * always
        return routed + always


@dataclass(frozen=True, slots=True)
class SideBySide:
    """A dense block beside routed experts, with norms of its own for what each takes and gives, and for their sum
    (Gemma 4). The router and the experts take the residual stream. scale: of the layer's output."""

    dense: DenseBlock
    moe: MoeBlock
    norm_dense: Norm
    norm_before_experts: Norm
    norm_experts: Norm
    norm_sum: Norm
    scale: float = 1.0

    by_row: ClassVar[bool] = False

    def watched(self, wrap: Callable[[Any], Any]) -> SideBySide:
        """The block with its dense block watched."""
        return replace(self, dense=self.dense.watched(wrap))

    def add(self, x: Tensor, residual: Tensor, multiplier: float) -> Tensor:
        """(residual + multiplier * both blocks) * scale; x: residual after the dense block's norm, (T, H) each."""
        (result,) = self.add_apart([(x, residual)], multiplier)
        return result

    def add_apart(self, parts: Sequence[tuple[Tensor, Tensor]], multiplier: float) -> list[Tensor]:
        """`add` of each (x, residual), bit for bit; each expert comes once for all of them."""
        experts, residuals = self.moe.experts, [residual for _, residual in parts]
        chosen = experts.route(self.moe.router, *residuals)
        given = [(self.norm_before_experts(its), *both[::-1]) for its, both in zip(residuals, chosen, strict=True)]
        routed = experts.apart(given)
        return [self._sum(*part, its, multiplier) for part, its in zip(parts, routed, strict=True)]

    def _sum(self, x: Tensor, residual: Tensor, routed: Tensor, multiplier: float) -> Tensor:
        always = self.norm_dense(self.dense(x))
        result = _added(residual, self.norm_sum(always + self.norm_experts(routed)), multiplier)
        return result if self.scale == 1 else result * self.scale


def _added(residual: Tensor, value: Tensor, multiplier: float) -> Tensor:
    return residual + (value if multiplier == 1 else value * multiplier)


ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
}
"""By the name that configs use."""
