"""What packing reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from tiermoe.types import MoeLayer, Segment


class ExpertSource(Protocol):
    """The experts of a checkpoint, one at a time, through transformers' own conversion."""

    layers: list[MoeLayer]

    def read(self, layer: int, expert: int) -> Mapping[str, torch.Tensor]:
        """Part name → values, each of the part's shape, in the model's compute dtype."""

    def in_place(self, layer: int, expert: int) -> list[Segment] | None:
        """Where the checkpoint holds the expert's bytes just as a slot wants them at 16 bits, else None."""
