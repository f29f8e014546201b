"""Where the sequences of a batch begin: what a mask says that hides nothing but a padding on the left."""

from __future__ import annotations

import torch


def first_positions(mask: torch.Tensor, sequences: int, positions: int) -> torch.Tensor | None:
    """Of a mask (B, 1, 1, L), true where one attends: int64 (B), the position from which on each sequence attends to
    all. None where the mask hides others, or nothing may be attended to, or it is no such mask.

    The layers of a model share the mask of a pass: what it says is kept with it."""
    known: tuple[int, torch.Tensor | None] | None = getattr(mask, "tiermoe_first", None)
    if known is None or known[0] != mask._version:
        known = mask.tiermoe_first = mask._version, _read(mask)  # type: ignore[attr-defined]
    fits = mask.shape == (sequences, 1, 1, positions)
    return known[1] if fits else None


def _read(mask: torch.Tensor) -> torch.Tensor | None:
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, 1):
        return None
    attended = mask[:, 0, 0]
    positions = attended.shape[1]
    first = positions - attended.sum(1)
    left = torch.equal(attended, torch.arange(positions) >= first[:, None])
    return first if left and int(first.max()) < positions else None
