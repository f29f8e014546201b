"""What lies between the two matrices of a gated expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def silu_gate(gate_up: Tensor) -> Tensor:
    """(M, 2 I) → (M, I): transformers' usual gate with SiLU, the same operations without the calls around them, which
    cost more than the operations for a single token."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gpt-oss's gate: columns of gate and up take turns; gate is at most `limit`, up between -limit and limit."""

    limit: float
    alpha: float

    def __call__(self, gate_up: Tensor) -> Tensor:
        """(M, 2 I) → (M, I), by the operations of transformers' `GptOssExperts`."""
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate = gate.clamp(min=None, max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
