"""A gate."""

from __future__ import annotations

import torch
from torch import Tensor

from tiermoe.kernels.gates import Kind


def relu_gate(gate_up: Tensor) -> Tensor:
    """(M, 2 I) → (M, I): the usual gate with ReLU."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.relu(gate) * up


RELU = Kind(relu_gate, native=None, act="relu", elementwise=torch.relu)
