"""Sources of packing and loading: checkpoints by tensor, experts by layer and number.

A source of a part of an expert names the tensors of the part's rows: a tensor of all experts with a row each, or, with
`EACH` in the place of the expert's number, a tensor for each expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tiermoe.errors import ModelError
from tiermoe.types import MoeLayer, Segment

if TYPE_CHECKING:
    import torch

EACH = "{}"

Sources = Mapping[str, Sequence[str]]
"""Part name → the sources of its rows, one after the other."""


@dataclass(frozen=True, slots=True)
class StoredAs:
    """Storage of a tensor's rows."""

    encoding: str  # name of the encoding; 'plain' for numbers that are values of their own
    dtype: torch.dtype  # of the values
    transposed: bool = False  # rows are the columns of what transformers has

    @property
    def label(self) -> str:
        """The name that people use: 'Q4_K', 'FP8', 'float32'."""
        return str(self.dtype).removeprefix("torch.") if self.encoding == "plain" else label_of(self.encoding)


def label_of(encoding: str) -> str:
    """The name that people use of an encoding in which weights were published: 'Q4_K', 'MXFP4'."""
    from tiermoe.formats.registry import encoding_named  # late: headers are read while torch is imported

    return str(getattr(encoding_named(encoding), "label", encoding))


class Entry(Protocol):
    """A tensor's values as reading gives them: `nbytes` of them."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


class TensorSource(Protocol):
    """The tensors of a checkpoint by name (`safetensors.Checkpoint`, `gguf_checkpoint.GgufCheckpoint`)."""

    directory: Path

    @property
    def tensors(self) -> Mapping[str, Entry]: ...

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str, row: int | None = None) -> torch.Tensor:
        """A fresh tensor with the values of `name`, or of one row along dimension 0 (kept, of size 1)."""

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """A fresh tensor with the rows first..last - 1 of `name` along dimension 0."""

    def fingerprint(self) -> str:
        """Fingerprint of the checkpoint, 16 hex digits."""

    def own_encoding(self, name: str) -> str | None:
        """The encoding in which a matrix can be used as it is stored; None where it cannot, or is plain values."""

    def fields(self, name: str) -> Mapping[str, torch.Tensor]:
        """The slot fields of such a matrix."""

    def columns(self, name: str) -> torch.Tensor | None:
        """Where each column of such a matrix is in its fields; None: in order."""

    def stored_as(self, source: str, expert: int) -> list[StoredAs]:
        """How an expert's tensor of a source is stored, a tensor at a time."""

    def in_place(self, sources: Sequence[str], expert: int, offsets: Mapping[str, int]) -> list[Segment]:
        """Where the expert's tensors are, field by field, to be placed one after the other from byte offsets[field] of
        an extent on."""

    def close(self) -> None:
        """Closes the files; reading opens them again."""


class ExpertSource(Protocol):
    """The experts of a checkpoint, one at a time, through transformers' own conversion."""

    layers: list[MoeLayer]

    def read(self, layer: int, expert: int) -> Mapping[str, torch.Tensor]:
        """Part name → values, each of the part's shape, in the model's compute dtype."""

    def in_place(self, layer: int, expert: int) -> list[Segment] | None:
        """Where the checkpoint has the expert's bytes just as a slot wants them at 16 bits, else None."""


def require_shards(folder: Path, shards: Sequence[Path]) -> None:
    """ModelError where a model's files in a folder are not all there."""
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(shards)} shards are missing in {folder}: {', '.join(missing[:3])}"
            f"{' …' if len(missing) > 3 else ''}; download them again"
        )
