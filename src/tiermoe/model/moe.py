"""Feed-forward part of a layer: a dense gated block, or a MoE block of a router, experts and perhaps a shared expert.

Routed experts are the engine's: `Experts` is the interface that a MoE block calls, `ExpertGate` the activation that the
engine computes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.formats.outline import Outline
from tiermoe.kernels import graphs
from tiermoe.kernels.gates import Activation, Gate, gate_named, gelu_tanh, relu_squared
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.parts import Linear, Norm
from tiermoe.model.routers import Router, RouterRule
from tiermoe.model.weights import Scope
from tiermoe.types import MoeLayer, Part

ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
    "relu2": relu_squared,
}
"""By the name that configs use."""


@dataclass(frozen=True, slots=True)
class ExpertGate:
    """Gate of a MoE layer's experts: the activation between their matrices."""

    experts: int  # of the layer
    activation: Gate

    def require_elementwise(self) -> Activation:
        """act of experts that are W2 (act(W1 x) * W3 x). ModelError if they are gated otherwise, so that the neuron
        unit cannot take them."""
        found = self.activation.kind.elementwise
        if found is None:
            name = self.activation.name
            raise ModelError(
                f"the neuron unit cannot take {name}: it does not compute act(W1 x) * W3 x; use the unit 'expert'"
            )
        return found


def named_gates(outline: Outline) -> list[ExpertGate]:
    """The gate of each layer of a whole outline."""
    assert outline.gate is not None
    activation = gate_named(*outline.gate)
    return [ExpertGate(layer.experts, activation) for layer in outline.layers]


class Experts(Protocol):
    """Experts of a MoE layer, resident or not. batch_invariant: a token's result does not depend on the other tokens of
    a call."""

    @property
    def batch_invariant(self) -> bool: ...

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """hidden (T, H), index (T, K) of the chosen experts, weights (T, K) → (T, H)."""
        ...

    def forward_ragged(self, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        """A ragged batch: computes each part separately, with the bits of a call of the part, and reads each expert
        once."""
        ...

    def block(self, router: Router, hidden: Tensor, residual: Tensor | None) -> Tensor | None:
        """residual, if any, + the sum of the experts that the router chooses for hidden, (T, H) each, in one call; None
        if no call computes that."""
        ...

    def route(self, router: Router, *parts: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each part's hidden (T, H) → weights (T, K) and experts (T, K) that run: the router's choice, or one that is
        made of its scores. All parts of a step come in one call."""
        ...


class FeedForward(Protocol):
    """Feed-forward part of a `layer.Layer`: a dense block, a MoE block, or both side by side."""

    @property
    def moe(self) -> MoeBlock | None: ...

    @property
    def batch_invariant(self) -> bool: ...

    def add(self, x: Tensor, residual: Tensor, multiplier: float) -> Tensor:
        """residual + multiplier * the part of x, (T, H) each."""
        ...

    def add_ragged(self, parts: Sequence[tuple[Tensor, Tensor]], multiplier: float) -> list[Tensor]:
        """`add` of each (x, residual), bit for bit; each expert is read once for all of them."""
        ...

    def watched(self, wrap: Callable[[Any], Any]) -> FeedForward:
        """The part with wrap(part) in the place of its dense parts."""
        ...


class NoExperts:
    """Experts of a decoder before an engine attaches a MoE layer."""

    batch_invariant = False

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        raise RuntimeError("this decoder's experts are not attached")

    def forward_ragged(self, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        return [self(*part) for part in parts]

    def block(self, router: Router, hidden: Tensor, residual: Tensor | None) -> Tensor | None:
        return None

    def route(self, router: Router, *parts: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [router.route(hidden) for hidden in parts]


@dataclass(frozen=True, slots=True)
class DenseBlock:
    """Dense block: down(activation(x times each of the first matrices)). These are gate and up, or one that is both, or
    up alone."""

    first: tuple[Linear, ...]
    down: Linear
    activation: Callable[..., Tensor]  # as many (T, ·) as there are first matrices → (T, ·)
    norm: Norm | None = None  # of what it gives

    moe: ClassVar[None] = None
    """Its MoE block: none."""

    def __call__(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """(T, H) → (T, H). tokens: as of a `MoeBlock`; they change nothing."""
        result = self.down(self.activation(*(matrix(x) for matrix in self.first)))
        return result if self.norm is None else self.norm(result)

    def forward_ragged(self, xs: Sequence[Tensor], tokens: Sequence[Tensor] | None = None) -> list[Tensor]:
        """A call with each x."""
        return [self(x) for x in xs]

    @property
    def batch_invariant(self) -> bool:
        return all(matrix.batch_invariant for matrix in (*self.first, self.down))

    def watched(self, wrap: Callable[[Any], Any]) -> DenseBlock:
        """The block with wrap(part) in the place of its matrices."""
        return replace(self, first=tuple(map(wrap, self.first)), down=wrap(self.down))

    def add(self, x: Tensor, residual: Tensor, multiplier: float) -> Tensor:
        (result,) = self.add_ragged([(x, residual)], multiplier)
        return result

    def add_ragged(self, parts: Sequence[tuple[Tensor, Tensor]], multiplier: float) -> list[Tensor]:
        added = functools.partial(self._added, multiplier=multiplier)
        return [graphs.launch((id(self), "dense", at), added, *part) for at, part in enumerate(parts)]

    def _added(self, x: Tensor, residual: Tensor, multiplier: float) -> Tensor:
        return add_to(residual, self(x), multiplier)


@dataclass(slots=True)
class MoeBlock:
    """MoE block: a token's routed experts and, for every token, a shared expert."""

    router: Router  # where there is a table it weighs what that names
    shared: DenseBlock | None = None
    shared_gate: Linear | None = None  # hidden → (T, 1), by whose sigmoid the shared expert is scaled (Qwen2-MoE)
    weighs_input: bool = False  # the router's weight multiplies what an expert takes, not what it gives (Llama 4)
    norm: Norm | None = None  # of what the block gives
    latent: tuple[Linear, Linear] | None = None  # hidden → the experts' columns, and back (Nemotron 3)
    table: Tensor | None = None  # int64 (vocabulary, K): the experts of each token, where they follow from it alone
    experts: Experts = field(default_factory=NoExperts)
    layer: MoeLayer | None = None  # names and shapes of the experts
    fused: bool = field(init=False)  # one native call can route tokens by the router and compute their experts

    def __post_init__(self) -> None:
        self.fused = not self.weighs_input and self.latent is None and self.table is None

    @property
    def moe(self) -> MoeBlock:
        """The block itself."""
        return self

    @property
    def batch_invariant(self) -> bool:
        always = [part for part in (self.shared, self.shared_gate, *(self.latent or ())) if part is not None]
        routed = self.experts.batch_invariant and self.router.batch_invariant
        return routed and all(part.batch_invariant for part in always)

    def watched(self, wrap: Callable[[Any], Any]) -> MoeBlock:
        """The block with its shared expert watched, and the projections around its experts."""
        shared = None if self.shared is None else self.shared.watched(wrap)
        latent = None if self.latent is None else (wrap(self.latent[0]), wrap(self.latent[1]))
        return replace(self, shared=shared, latent=latent)

    def __call__(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """(T, H) → (T, H), valid until the next call. tokens: ids int64 (T), which a block with a table needs."""
        result = self.experts.block(self.router, x, None) if self.fused else None
        if result is None:
            ((weights, index),) = self._routed([x], None if tokens is None else [tokens])
            result = self.experts(*self._given(x, index, weights))
        return self._whole(x, result)

    def forward_ragged(self, xs: Sequence[Tensor], tokens: Sequence[Tensor] | None = None) -> list[Tensor]:
        """A call with each x, bit for bit; each expert is read once for all of them."""
        return [self._whole(x, result) for x, result in zip(xs, self._sums(xs, tokens), strict=True)]

    def add(self, x: Tensor, residual: Tensor, multiplier: float) -> Tensor:
        if self.fused and self.shared is None and self.norm is None and multiplier == 1:
            result = self.experts.block(self.router, x, residual)
            if result is not None:
                return result
        elif self.fused and (result := self.experts.block(self.router, x, None)) is not None:
            return add_to(residual, self._whole(x, result), multiplier)
        (result,) = self.add_ragged([(x, residual)], multiplier)
        return result

    def add_ragged(self, parts: Sequence[tuple[Tensor, Tensor]], multiplier: float) -> list[Tensor]:
        sums = self._sums([x for x, _ in parts], None)
        end = functools.partial(self._ended, multiplier=multiplier)
        return [
            graphs.launch((id(self), "end", at), end, x, residual, result)
            for at, ((x, residual), result) in enumerate(zip(parts, sums, strict=True))
        ]

    def _sums(self, xs: Sequence[Tensor], tokens: Sequence[Tensor] | None) -> list[Tensor]:
        """What the routed experts give of each part."""
        chosen = self._routed(xs, tokens)
        given = [self._given(x, index, weights) for x, (weights, index) in zip(xs, chosen, strict=True)]
        return self.experts.forward_ragged(given)

    def _routed(self, xs: Sequence[Tensor], tokens: Sequence[Tensor] | None) -> list[tuple[Tensor, Tensor]]:
        """Each part's weights and experts, (T, K) each."""
        if self.table is None:
            return self.experts.route(self.router, *xs)
        assert tokens is not None
        named = [self.table[each] for each in tokens]
        return [(self.router.weigh(x, experts), experts) for x, experts in zip(xs, named, strict=True)]

    def _given(self, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the experts are called with; weights of inputs are those of a token's only expert."""
        if self.weighs_input:
            return x * weights.to(x.device, non_blocking=True), index, torch.ones_like(weights)
        return x if self.latent is None else self.latent[0](x), index, weights

    def _ended(self, x: Tensor, residual: Tensor, routed: Tensor, multiplier: float) -> Tensor:
        """residual + multiplier * what the block gives of x."""
        return add_to(residual, self._whole(x, routed), multiplier)

    def _whole(self, x: Tensor, routed: Tensor) -> Tensor:
        """What the block gives of x, whose routed experts gave `routed`."""
        if self.latent is not None:
            routed = self.latent[1](routed)
        if self.shared is not None:
            always = self.shared(x)
            if self.shared_gate is not None:
                always = torch.sigmoid(self.shared_gate(x)) * always
            routed = routed + always
        return routed if self.norm is None else self.norm(routed)


def dense(
    w: Scope,
    inner: int,
    activation: str | Callable[..., Tensor],
    *,
    first: Sequence[str] = ("gate_proj", "up_proj"),
    down: str = "down_proj",
    fused: bool = False,
    norm: Norm | None = None,
) -> DenseBlock:
    """The dense block with the weights of `w` ('mlp'), of `inner` columns between its matrices. activation: one of
    `ACTIVATIONS`, or what is between the matrices. first, down: names of the matrices; the first ones are gate and up
    in this order, or one that is both (fused: rows of gate, then of up), or up alone. norm: of what the block gives."""
    between = activation if callable(activation) else ACTIVATIONS[activation]
    if not callable(activation) and (fused or len(first) == 2):
        between = gated(between)
    matrices = tuple(w.linear(name, 2 * inner if fused else inner, w.hidden) for name in first)
    return DenseBlock(matrices, w.linear(down, w.hidden, inner), between, norm)


def moe(
    w: Scope,
    rule: RouterRule,
    experts: int,
    inner: int,
    *,
    router: str = "gate",
    correction: str | None = None,
    shared: DenseBlock | None = None,
    shared_gate: str | None = None,
    latent: tuple[str, str, int] | None = None,
    table: str | None = None,
    weighs_input: bool = False,
    gateless: bool = False,
    biased: bool = False,
    norm: Norm | None = None,
) -> MoeBlock:
    """The MoE block with the weights of `w` ('mlp'): so many `experts` of `inner` columns between their matrices.

    router: name of the router's matrix; correction: of the bias that is added to its scores for the choice alone, if
    the layer has one. shared: an expert of every token; shared_gate: name of the matrix of its gate. latent: names of
    the projections before and after the experts, and the columns that they take. table: name of the table of tokens'
    experts, of layers that have one. weighs_input, norm: of `MoeBlock`. gateless: experts have no gate. biased: their
    matrices have biases."""
    bias = w.tensor(f"{router}.bias", experts) if w.has(f"{router}.bias") else None
    corrects = correction is not None and w.has(correction)
    routed = Router(
        w.tensor(f"{router}.weight", experts, w.hidden),
        rule,
        bias,
        w.flat(correction, experts) if correction is not None and corrects else None,
    )
    named = None
    if table is not None and w.has(table):
        named = w.table(table, experts)
    projections = None
    if latent is not None:
        before, after, columns = latent
        projections = w.linear(before, columns, w.hidden), w.linear(after, w.hidden, columns)
    return MoeBlock(
        routed,
        shared,
        w.linear(shared_gate, 1, w.hidden) if shared_gate is not None else None,
        weighs_input,
        norm,
        projections,
        named,
        layer=moe_layer(w, experts, rule.top_k, inner, latent[2] if latent else w.hidden, gateless, biased),
    )


def moe_or_dense(
    w: Scope,
    config: ModelConfig,
    rule: RouterRule,
    experts: int,
    *,
    shared: int | None = 0,
    inner: int | None = None,
    activation: Callable[..., Tensor] | None = None,
    router: str = "gate",
    correction: str | None = None,
    shared_name: str = "shared_experts",
    norm: Norm | None = None,
) -> MoeBlock | DenseBlock:
    """The feed-forward part with the weights of `w`: `moe`, or `dense` in a layer without a router, of the config's
    `intermediate_size`. shared: experts beside the routed ones, in one matrix, if the layer has some. inner: columns of
    an expert, None: the config's `moe_intermediate_size`. activation: of dense blocks, None: the config's `hidden_act`.
    router, correction, norm: of `moe`."""
    between = config.hidden_act if activation is None else activation
    if not w.has(f"{router}.weight"):
        return dense(w, config.intermediate_size, between, norm=norm)
    inner = config.moe_intermediate_size if inner is None else inner
    beside = dense(w.at(shared_name), (shared or 0) * inner, between) if w.has(shared_name) else None
    return moe(w, rule, experts, inner, router=router, correction=correction, shared=beside, norm=norm)


FIRST, UNGATED, SECOND = "gate_up_proj", "up_proj", "down_proj"
"""The names of a layer's stacked expert matrices in all families; the first has no gate in some."""


def moe_layer(
    w: Scope, experts: int, top_k: int, inner: int, columns: int, gateless: bool = False, biased: bool = False
) -> MoeLayer:
    """The experts below `w`: matrices of (2 inner, columns), without a gate (inner, columns), and (columns, inner)."""
    first = Part(UNGATED, (inner, columns)) if gateless else Part(FIRST, (2 * inner, columns))
    parts = [first, Part(SECOND, (columns, inner))]
    if biased:
        parts = [each for part in parts for each in (part, Part(f"{part.name}_bias", part.shape[:1]))]
    return MoeLayer(w.path("experts"), experts, top_k, tuple(parts))


def gated(activation: Activation) -> Callable[..., Tensor]:
    """Of gate and up, or of both side by side: activation(gate) * up."""

    def gate(*features: Tensor) -> Tensor:
        gate, up = features if len(features) == 2 else features[0].chunk(2, dim=-1)
        return activation(gate) * up

    return gate


def add_to(residual: Tensor, value: Tensor, multiplier: float) -> Tensor:
    """residual + multiplier * value."""
    return residual + (value if multiplier == 1 else value * multiplier)
