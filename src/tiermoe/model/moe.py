"""Feed-forward part of a layer: a dense gated block, or a MoE block of a router, experts and perhaps a shared expert.

Routed experts are the engine's: `Experts` is the interface that a MoE block calls, `ExpertGate` the activation that the
engine computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.formats.outline import Outline
from tiermoe.kernels.experts import Activation as FirstToSecond
from tiermoe.kernels.gates import gate_named, gelu_tanh, relu_squared
from tiermoe.model.architecture import FamilyWeights
from tiermoe.model.by_token import by_token
from tiermoe.model.linear import Linear
from tiermoe.model.norms import Norm
from tiermoe.model.routers import Router

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": partial(by_token, F.gelu),
    "gelu_pytorch_tanh": partial(by_token, gelu_tanh),
    "relu": F.relu,
    "relu2": relu_squared,
}
"""By the name that configs use. torch rounds a few inputs of GELU differently at the end of a long row."""


@dataclass(frozen=True, slots=True)
class ExpertGate:
    """Gate of a MoE layer's experts: the activation between their matrices."""

    experts: int  # of the layer
    activation: FirstToSecond  # features (T, ·) of the first matrix → features before the second
    elementwise: Activation | None  # act of experts that are W2 (act(W1 x) * W3 x); None: they are gated otherwise
    name: str  # of the gate, for messages

    def require_elementwise(self) -> Activation:
        """`elementwise`. ModelError where there is none, so that the neuron unit cannot take the experts."""
        if self.elementwise is None:
            raise ModelError(
                f"the neuron unit cannot take {self.name}: it does not compute act(W1 x) * W3 x; use the unit 'expert'"
            )
        return self.elementwise


_ELEMENTWISE: dict[tuple[Any, ...], Activation] = {("silu",): F.silu, ("gelu_tanh",): gelu_tanh}


def named_gates(outline: Outline) -> list[ExpertGate]:
    """The gate of each layer of a whole outline."""
    assert outline.gate is not None
    name = tuple(outline.gate)
    activation, elementwise = gate_named(name), _ELEMENTWISE.get(name)
    return [ExpertGate(layer.experts, activation, elementwise, str(name[0])) for layer in outline.layers]


class Experts(Protocol):
    """Experts of a MoE layer, resident or not. batch_invariant: a token's result does not depend on the other tokens of
    a call of up to FEW_TOKENS."""

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
        where no call computes that."""
        ...

    def route(self, router: Router, *parts: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each part's hidden (T, H) → weights (T, K) and experts (T, K) that run: the router's choice, or one that is
        made of its scores. All parts of a step come in one call."""
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

    @classmethod
    def of(cls, weights: FamilyWeights, part: str, activation: str, norm: Norm | None = None) -> DenseBlock:
        """The block at the path `part`, with one of `ACTIVATIONS`, or the family's own gate."""
        of, act = weights.architecture, ACTIVATIONS[activation]
        between = of.dense_gate(weights.config) if of.dense_gate else act if of.gateless else _gated(act)
        first = tuple(weights.linear(f"{part}.{of.named(name)}") for name in of.first_matrices)
        return cls(first, weights.linear(f"{part}.{of.named('down_proj')}"), between, norm)

    def __call__(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """(T, H) → (T, H). tokens: as of a `MoeBlock`; they change nothing."""
        result = self.down(self.activation(*(matrix(x) for matrix in self.first)))
        return result if self.norm is None else self.norm(result)

    def forward_ragged(self, xs: Sequence[Tensor], tokens: Sequence[Tensor] | None = None) -> list[Tensor]:
        """A call with each x."""
        return [self(x) for x in xs]

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's values do not depend on the other tokens of a call of up to FEW_TOKENS."""
        return all(matrix.batch_invariant for matrix in (*self.first, self.down))

    def watched(self, wrap: Callable[[Any], Any]) -> DenseBlock:
        """The block with wrap(part) in the place of its matrices."""
        return replace(self, first=tuple(map(wrap, self.first)), down=wrap(self.down))

    def add(self, x: Tensor, residual: Tensor, multiplier: float) -> Tensor:
        """residual + multiplier * the block of x, (T, H) each."""
        return add_to(residual, self(x), multiplier)

    def add_ragged(self, parts: Sequence[tuple[Tensor, Tensor]], multiplier: float) -> list[Tensor]:
        """`add` of each (x, residual)."""
        return [self.add(x, residual, multiplier) for x, residual in parts]


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
    fused: bool = field(init=False)  # one native call can route tokens by the router and compute their experts

    def __post_init__(self) -> None:
        self.fused = not self.weighs_input and self.latent is None and self.table is None

    @property
    def moe(self) -> MoeBlock:
        """The block itself."""
        return self

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's values do not depend on the other tokens of a call of up to FEW_TOKENS."""
        always = [part for part in (self.shared, self.shared_gate, *(self.latent or ())) if part is not None]
        return self.experts.batch_invariant and all(part.batch_invariant for part in always)

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
        chosen = self._routed(xs, tokens)
        routed = self.experts.forward_ragged(
            [self._given(x, index, weights) for x, (weights, index) in zip(xs, chosen, strict=True)]
        )
        return [self._whole(x, result) for x, result in zip(xs, routed, strict=True)]

    def add(self, x: Tensor, residual: Tensor, multiplier: float) -> Tensor:
        """residual + multiplier * the block of x, (T, H) each."""
        if self.fused and self.shared is None and self.norm is None and multiplier == 1:
            result = self.experts.block(self.router, x, residual)
            if result is not None:
                return result
        return add_to(residual, self(x), multiplier)

    def add_ragged(self, parts: Sequence[tuple[Tensor, Tensor]], multiplier: float) -> list[Tensor]:
        """`add` of each (x, residual), bit for bit; each expert is read once for all of them."""
        results = self.forward_ragged([x for x, _ in parts])
        return [add_to(residual, result, multiplier) for (_, residual), result in zip(parts, results, strict=True)]

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
            return x * weights, index, torch.ones_like(weights)
        return x if self.latent is None else self.latent[0](x), index, weights

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


def feed_forward(weights: FamilyWeights, layer: str, activation: str) -> MoeBlock | DenseBlock:
    """The feed-forward part of the layer at the path `layer`: a MoE block where there is a router. activation: of dense
    blocks."""
    of = weights.architecture
    part = f"{layer}.{of.block}"
    gate, correction = f"{part}.{of.gate}", f"{part}.{of.correction}"
    fed = f"{layer}.{of.norm_fed}"
    norm = weights.norm(fed) if of.norm_fed and weights.has(fed) else None
    if not weights.has(f"{gate}.weight"):
        return DenseBlock.of(weights, part, activation, norm)
    bias = weights.optional_tensor(correction) if of.correction else None
    router = Router(
        weights.tensor(f"{gate}.weight"),
        of.router(weights.config),
        weights.optional_tensor(f"{gate}.bias"),
        None if bias is None else bias.flatten(),
    )
    table = weights.optional_tensor(f"{part}.{of.table}") if of.table else None
    if table is not None:
        check_table(table, router.weight.shape[0], f"{part}.{of.table}")
    shared = None
    if of.shared_beside and weights.has(f"{layer}.{of.shared_beside}"):
        first, second = (weights.linear(f"{layer}.{of.shared_beside}.{name}_linear") for name in ("input", "output"))
        shared = DenseBlock((first,), second, _gated(ACTIVATIONS[activation]))
    elif of.shared and weights.has(f"{part}.{of.shared}"):
        shared = DenseBlock.of(weights, f"{part}.{of.shared}", activation)
    return MoeBlock(
        router,
        shared,
        weights.linear(f"{part}.{of.shared_gate}") if of.shared_gate else None,
        of.weighs_input,
        norm,
        _latent(weights, part),
        table,
    )


def _latent(weights: FamilyWeights, part: str) -> tuple[Linear, Linear] | None:
    """The projections before and behind the experts of the block at the path `part`; None where it has none."""
    before, behind = weights.architecture.latent_experts or ("", "")
    if not before or not weights.has(f"{part}.{before}.weight"):
        return None
    return weights.linear(f"{part}.{before}"), weights.linear(f"{part}.{behind}")


def _gated(activation: Activation) -> Callable[..., Tensor]:
    """Of gate and up, or of both side by side: activation(gate) * up."""

    def gate(*features: Tensor) -> Tensor:
        gate, up = features if len(features) == 2 else features[0].chunk(2, dim=-1)
        return activation(gate) * up

    return gate


def check_table(table: Tensor, experts: int, path: str) -> None:
    """ModelError where a table of tokens' experts names one that a layer of so many does not have."""
    least, most = (int(each) for each in torch.aminmax(table))
    if least < 0 or most >= experts:
        raise ModelError(
            f"{path} names experts from {least} to {most}, and the layer has {experts}; download the model again"
        )


def add_to(residual: Tensor, value: Tensor, multiplier: float) -> Tensor:
    """residual + multiplier * value."""
    return residual + (value if multiplier == 1 else value * multiplier)
