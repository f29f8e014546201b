"""Where a tensor of a safetensors file lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tiermoe.types import Segment


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a shard: `offset` is from the start of the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def segment(self, row: int | None, at: int) -> Segment:
        """Where its bytes (or those of one row) lie, to be placed at byte `at` of an extent."""
        nbytes = self.nbytes if row is None else self.nbytes // self.shape[0]
        return Segment(str(self.file), self.offset + (row or 0) * nbytes, nbytes, at)
