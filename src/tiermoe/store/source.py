"""What packing reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from tiermoe.types import MoeLayer, Segment


class Entry(Protocol):
    """A tensor's values as reading gives them: `nbytes` of them."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


class TensorSource(Protocol):
    """The tensors of a checkpoint by name (`checkpoint.Checkpoint`, `gguf.checkpoint.GgufCheckpoint`)."""

    directory: Path

    @property
    def tensors(self) -> Mapping[str, Entry]: ...

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str, row: int | None = None) -> torch.Tensor:
        """A fresh tensor with the values of `name`, or of its `row` along dimension 0 (kept, of size 1)."""

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """A fresh tensor with the rows first..last - 1 of `name` along dimension 0."""

    def fingerprint(self) -> str:
        """16 hex digits that tell this checkpoint from others."""

    def own_encoding(self, name: str) -> str | None:
        """The encoding in which a matrix can be used as it lies; None where it cannot, or is plain values."""

    def fields(self, name: str) -> Mapping[str, torch.Tensor]:
        """Such a matrix, as a slot holds it."""

    def columns(self, name: str) -> torch.Tensor | None:
        """Where each column of such a matrix lies in its fields; None: in order."""

    def close(self) -> None:
        """Closes the files; reading opens them again."""


class ExpertSource(Protocol):
    """The experts of a checkpoint, one at a time, through transformers' own conversion."""

    layers: list[MoeLayer]

    def read(self, layer: int, expert: int) -> Mapping[str, torch.Tensor]:
        """Part name → values, each of the part's shape, in the model's compute dtype."""

    def in_place(self, layer: int, expert: int) -> list[Segment] | None:
        """Where the checkpoint holds the expert's bytes just as a slot wants them at 16 bits, else None."""
