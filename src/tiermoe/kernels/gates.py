"""Gates: the activation between the two matrices of an expert. `GATES` has all of them by name, native/expert.h those
that C computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
from torch import Tensor

from tiermoe import native

Activation = Callable[[Tensor], Tensor]

_gelu_tanh: Activation = partial(torch.nn.functional.gelu, approximate="tanh")


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by tanh, the same for a number wherever it stands: torch rounds four of bfloat16's otherwise at the end of a
    row, or of what one of its threads takes."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return _gelu_tanh(x)
    return _gelus()[x.view(torch.int16).int()]


@lru_cache(maxsize=1)
def _gelus() -> Tensor:
    """Of each bfloat16 number, by its bits; negative ones count from the end. A block has no end of a row, and is too
    small for several threads."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return torch.cat([_gelu_tanh(block) for block in torch.split(numbers, 1 << 12)])


def silu_gate(gate_up: Tensor) -> Tensor:
    """(M, 2 I) → (M, I): transformers' usual gate with SiLU, the same operations without the calls around them, which
    cost more than the operations for a single token."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gelu_gate(gate_up: Tensor) -> Tensor:
    """(M, 2 I) → (M, I): the usual gate with GELU by tanh (Gemma 4)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


def relu_squared(features: Tensor) -> Tensor:
    """(…) → (…): the activation of experts without a gate (Nemotron-H)."""
    return torch.square(torch.relu(features))


def clamped_gate(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """(M, 2 I) → (M, I): gpt-oss's gate, whose columns and those of up take turns."""
    return _clamped(gate_up[..., ::2], gate_up[..., 1::2], limit, alpha)


def clamped_halves(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """(M, 2 I) → (M, I): gpt-oss's gate, all columns of gate before those of up, as in GGUF files (MiniMax-M3)."""
    gate, up = gate_up.tensor_split(2, dim=-1)
    return _clamped(gate, up, limit, alpha)


def _clamped(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """Gate at most `limit`, up between -limit and limit, by the operations of transformers' `GptOssExperts`."""
    gate = gate.clamp(min=None, max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def limited_gate(gate_up: Tensor, limit: float) -> Tensor:
    """(M, 2 I) → (M, I): DeepSeek-V4's gate."""
    gate, up = gate_up.chunk(2, dim=-1)
    return limited_silu(gate, up, limit)


def limited_silu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """(M, I) each → (M, I): gate at most `limit`, up between -limit and limit, by the operations of transformers'
    `DeepseekV4Experts`."""
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


@dataclass(frozen=True, slots=True)
class Kind:
    """An entry of `GATES`."""

    function: Callable[..., Tensor]  # features of the first matrix, settings → features before the second, in torch
    native: str | None  # its name in native/expert.h; None: torch computes it, and the experts are slow
    act: str = ""  # what configs call the activation of a usual gate, act(gate) * up, or act(up) where it is not gated
    settings: int = 0  # numbers that it takes
    elementwise: Activation | None = None  # act of experts that are W2 (act(W1 x) * W3 x); None: gated otherwise
    gated: bool = True  # the first matrix has rows of gate and up, else of up alone
    in_halves: str = ""  # the gate of the same values where columns of gate come before those of up; empty: itself


GATES: dict[str, Kind] = {
    "silu": Kind(silu_gate, "SILU", "silu", elementwise=torch.nn.functional.silu),
    "gelu_tanh": Kind(gelu_gate, "GELU_TANH", "gelu_pytorch_tanh", elementwise=gelu_tanh),
    "relu2": Kind(relu_squared, "RELU_SQUARED", "relu2", gated=False),
    "clamped": Kind(clamped_gate, "CLAMPED", settings=2, in_halves="clamped in halves"),
    "clamped in halves": Kind(clamped_halves, "CLAMPED_HALVES", settings=2),
    "limited silu": Kind(limited_gate, "LIMITED_SILU", settings=1),
}
"""By the name that outlines keep. A gate without a name in C works as the others, computed by torch (`slow_gate`)."""


@dataclass(frozen=True, slots=True)
class Gate:
    """A gate and its settings (limit, alpha). Two with one name and equal settings are equal."""

    name: str  # in `GATES`; of another, what messages call it
    settings: tuple[float, ...] = ()
    kind: Kind = field(compare=False, kw_only=True)

    def __call__(self, features: Tensor) -> Tensor:
        """Features (M, ·) of the first matrix → features before the second, in torch."""
        return self.kind.function(features, *self.settings)

    @property
    def stored(self) -> tuple[str | float, ...] | None:
        """What an outline keeps of it, for `gate_named`; None where it is not in `GATES`."""
        return (self.name, *self.settings) if GATES.get(self.name) is self.kind else None

    @property
    def in_halves(self) -> Gate:
        """The gate of the same values where columns of gate come before those of up."""
        other = self.kind.in_halves
        return gate_named(other, *self.settings) if other else self

    @property
    def native(self) -> int | None:
        """Its number in native/expert.h; None where torch computes it."""
        return native.GATES.get(self.kind.native) if self.kind.native else None


def gate_named(name: str, *settings: float) -> Gate:
    """The gate of a name in `GATES`. ValueError for another, or for another number of settings."""
    kind = GATES.get(name)
    if kind is None or len(settings) != kind.settings:
        raise ValueError(f"no gate is called {(name, *settings)!r}")
    return Gate(name, tuple(map(float, settings)), kind=kind)


def usual_gate(act: str | None) -> Gate | None:
    """The gate that consists of the activation of this name in configs; None where `GATES` has none."""
    return next((gate_named(name) for name, kind in GATES.items() if act and kind.act == act), None)


def other_gate(name: str, function: Activation, elementwise: Activation | None = None) -> Gate:
    """A gate that is not in `GATES`, such as that of a module of transformers; torch computes it."""
    return Gate(name, kind=Kind(function, None, elementwise=elementwise))


def slow_gate(of: Gate | None) -> str | None:
    """A sentence for a gate that no kernel computes, on what it costs; None for the others. of: None: a gate of which
    outlines keep no name."""
    if of is not None and of.kind.native is not None:
        return None
    needs = "" if of is not None and of.stored else ", and transformers is imported at every start"
    name = "this model's experts" if of is None else of.name
    return f"no kernel computes the gate of {name}: torch computes the experts, about three times slower{needs}"
