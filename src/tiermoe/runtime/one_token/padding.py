"""Where the sequences of a batch begin: what a mask says that hides nothing but a padding on the left."""

from __future__ import annotations

import torch


class Padding:
    """Reads the masks of a pass once for all layers, which share them."""

    def __init__(self) -> None:
        self._layer = -1
        self._read: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def first_positions(self, mask: torch.Tensor, layer: int, sequences: int, positions: int) -> torch.Tensor | None:
        """`first_positions` for layer `layer`. Layers run in ascending order: one that is not above the last begins
        another pass, in whose masks anything may have been written since."""
        if layer <= self._layer:
            self._read.clear()
        self._layer = layer
        if mask.shape != (sequences, 1, 1, positions):
            return None
        for known, first in self._read:
            if known is mask:
                return first
        self._read.append((mask, first_positions(mask)))
        return self._read[-1][1]


def first_positions(mask: torch.Tensor) -> torch.Tensor | None:
    """Of a mask (B, 1, 1, L), true where one attends: int64 (B), the position from which on each sequence attends to
    all. None where the mask hides others, or nothing may be attended to, or it is no such mask."""
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, 1):
        return None
    attended = mask[:, 0, 0]
    positions = attended.shape[1]
    first = positions - attended.sum(1)
    left = torch.equal(attended, torch.arange(positions) >= first[:, None])
    return first if left and int(first.max()) < positions else None
