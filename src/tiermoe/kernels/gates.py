"""Gates: the activation between the two matrices of an expert, which few experts have without a gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


def silu_gate(gate_up: Tensor) -> Tensor:
    """(M, 2 I) → (M, I): transformers' usual gate with SiLU, the same operations without the calls around them, which
    cost more than the operations for a single token."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


gelu_tanh: Callable[[Tensor], Tensor] = partial(torch.nn.functional.gelu, approximate="tanh")


def gelu_gate(gate_up: Tensor) -> Tensor:
    """(M, 2 I) → (M, I): the usual gate with GELU by tanh (Gemma 4)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


def relu_squared(features: Tensor) -> Tensor:
    """(…) → (…): the activation of experts without a gate (Nemotron-H)."""
    return torch.square(torch.relu(features))


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gpt-oss's gate: gate is at most `limit`, up between -limit and limit. `halves`: columns of gate come before those
    of up, as in GGUF files; else they take turns."""

    limit: float
    alpha: float
    halves: bool = False

    def __call__(self, gate_up: Tensor) -> Tensor:
        """(M, 2 I) → (M, I), by the operations of transformers' `GptOssExperts`."""
        gate, up = gate_up.tensor_split(2, dim=-1) if self.halves else (gate_up[..., ::2], gate_up[..., 1::2])
        gate = gate.clamp(min=None, max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


@dataclass(frozen=True, slots=True)
class LimitedSilu:
    """DeepSeek-V4's gate: `silu_gate` of a gate that is at most `limit`, and an up between -limit and limit."""

    limit: float

    def __call__(self, gate_up: Tensor) -> Tensor:
        """(M, 2 I) → (M, I)."""
        return self.of(*gate_up.chunk(2, dim=-1))

    def of(self, gate: Tensor, up: Tensor) -> Tensor:
        """(M, I) each → (M, I), by the operations of transformers' `DeepseekV4Experts`."""
        return torch.nn.functional.silu(gate.clamp(max=self.limit)) * up.clamp(min=-self.limit, max=self.limit)


Gate = Callable[[Tensor], Tensor]


def gate_name(gate: Gate) -> tuple[Any, ...] | None:
    """The name of a gate, for `gate_named`; None for a gate of another module."""
    if gate is silu_gate:
        return ("silu",)
    if gate is gelu_gate:
        return ("gelu_tanh",)
    if gate is relu_squared:
        return ("relu2",)
    if isinstance(gate, ClampedGate):
        return ("clamped in halves" if gate.halves else "clamped", gate.limit, gate.alpha)
    return ("limited silu", gate.limit) if isinstance(gate, LimitedSilu) else None


def in_halves(name: tuple[Any, ...]) -> tuple[Any, ...]:
    """The name of the gate of the same values where columns of gate come before those of up."""
    return ("clamped in halves", *name[1:]) if name[0] == "clamped" else name


def gate_named(name: Sequence[Any]) -> Gate:
    """The gate that `gate_name` named. ValueError for any other name."""
    match tuple(name):
        case ("silu",):
            return silu_gate
        case ("gelu_tanh",):
            return gelu_gate
        case ("relu2",):
            return relu_squared
        case ("clamped", limit, alpha):
            return ClampedGate(float(limit), float(alpha))
        case ("clamped in halves", limit, alpha):
            return ClampedGate(float(limit), float(alpha), halves=True)
        case ("limited silu", limit):
            return LimitedSilu(float(limit))
    raise ValueError(f"no gate is called {name!r}")
