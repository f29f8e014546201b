"""What a MoE layer's experts compute between their matrices, as the engine asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch.nn.functional import silu

from tiermoe.errors import ModelError
from tiermoe.kernels.expert import Activation
from tiermoe.kernels.gates import gate_named, gelu_tanh
from tiermoe.store.outline import Outline


class ExpertGate(Protocol):
    """Of the `experts` of one MoE layer."""

    @property
    def experts(self) -> int: ...

    def activation(self) -> Activation:
        """Features (T, ·) of the first matrix → features before the second."""

    def alone(self) -> Activation:
        """act of experts that are W2 (act(W1 x) * W3 x). ModelError where they are gated otherwise."""


class NamedGate:
    """One that an outline names."""

    def __init__(self, experts: int, name: Sequence[Any]) -> None:
        self.experts = experts
        self._name = tuple(name)

    def activation(self) -> Activation:
        return gate_named(self._name)

    def alone(self) -> Activation:
        if self._name == ("silu",):
            return silu
        if self._name == ("gelu_tanh",):
            return gelu_tanh
        raise refused(self._name[0])


def named_gates(outline: Outline) -> list[NamedGate]:
    """Of a whole outline's layers."""
    assert outline.gate is not None
    return [NamedGate(layer.experts, outline.gate) for layer in outline.layers]


def refused(what: str) -> ModelError:
    """The error for experts that the neuron unit cannot take."""
    return ModelError(
        f"the neuron unit cannot take {what}: it does not compute act(W1 x) * W3 x; use the unit 'expert'"
    )
