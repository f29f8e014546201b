"""The parameters of a model in a GGUF file, read with preads as they are asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.store.checkpoint import Descriptors, fingerprint_of
from tiermoe.store.gguf.file import GgufFile
from tiermoe.store.gguf.header import GgufTensor
from tiermoe.store.gguf.parameter import Parameter, Rows, Stacked, encoding_of
from tiermoe.store.own_experts import LiesAs
from tiermoe.types import Segment


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """A parameter's values as they are read: `nbytes` of them in `dtype`."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class GgufCheckpoint:
    """`store.source.Checkpoint` of a GGUF file. Names are those of the parameters in transformers' model. Experts are
    stacked: (experts, rows, columns), rows of gate before those of up."""

    def __init__(self, file: GgufFile, parameters: Mapping[str, Parameter]) -> None:
        self.file = file
        self.directory = file.path
        self.shards = list(file.shards)
        self.parameters = parameters
        self.tensors = {name: GgufEntry(each.dtype, each.shape) for name, each in parameters.items()}
        self._descriptors = Descriptors()
        self._fingerprint: str | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.parameters

    def read(self, name: str, row: int | None = None) -> Tensor:
        """A fresh tensor with the values of `name`, or of its `row` along dimension 0 (kept, of size 1)."""
        first, last = (0, self.parameters[name].shape[0]) if row is None else (row, row + 1)
        return self.read_rows(name, first, last)

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        """A fresh tensor with the rows first..last - 1 of `name` along dimension 0. ModelError where they cannot be
        read."""
        return self.parameters[name].read(self._read, first, last)

    def own_encoding(self, name: str) -> str | None:
        """The encoding of a matrix that is rows of blocks of one tensor; None for other parameters."""
        parameter = self.parameters[name]
        if not isinstance(parameter, Rows) or len(parameter.shape) != 2 or parameter.encoding() == "plain":
            return None
        return parameter.encoding()

    def fields(self, name: str) -> dict[str, Tensor]:
        """The blocks of such a matrix, uint8 (rows, bytes of a row), in the parameter's order."""
        parameter = self.parameters[name]
        assert isinstance(parameter, Rows)
        return {"blocks": parameter.blocks(self._read, 0, parameter.shape[0])}

    def columns(self, name: str) -> Tensor | None:
        """Where each column of such a matrix lies in its blocks; None: in order."""
        parameter = self.parameters[name]
        return parameter.columns if isinstance(parameter, Rows) else None

    def ways(self, source: str, expert: int) -> list[LiesAs]:
        """How a parameter of all experts lies, a tensor at a time."""
        parameter = self.parameters[source]
        assert isinstance(parameter, Stacked)
        return [LiesAs(encoding_of(tensor), tensor.kind.dtype or torch.float32) for tensor in parameter.tensors]

    def in_place(self, sources: Sequence[str], expert: int, offsets: Mapping[str, int]) -> list[Segment]:
        """Where the rows of one expert lie, to be placed one after the other at the byte of the only field and on, or
        each tensor at that of its own."""
        segments: list[Segment] = []
        (source,), places = sources, list(offsets.values())
        parameter = self.parameters[source]
        assert isinstance(parameter, Stacked)
        for index, tensor in enumerate(parameter.tensors):
            nbytes = tensor.nbytes // tensor.shape[0]
            at = places[index] if len(places) > 1 else places[0] + sum(each.nbytes for each in segments)
            segments.append(Segment(str(tensor.file), tensor.offset + expert * nbytes, nbytes, at))
        return segments

    def fingerprint(self) -> str:
        """16 hex digits over the headers, the sizes and 32 samples of 4 KiB of each shard. Taken once."""
        if self._fingerprint is None:
            parts = zip(self.file.shards, self.file.digests, strict=True)
            self._fingerprint = fingerprint_of(b"", parts, self._descriptors)
        return self._fingerprint

    def close(self) -> None:
        """Closes the files; reading opens them again."""
        self._descriptors.close()

    def _read(self, tensor: GgufTensor, first: int, last: int) -> Tensor:
        nbytes = tensor.nbytes // tensor.shape[0]
        return self._descriptors.read(tensor.file, tensor.offset + first * nbytes, (last - first) * nbytes)
