"""The parameters of a model in a GGUF file, read with preads as they are asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.store.checkpoint import Descriptors, fingerprint_of
from tiermoe.store.gguf.file import GgufFile
from tiermoe.store.gguf.header import GgufTensor
from tiermoe.store.gguf.parameter import Parameter, Rows, Stacked
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

    def blocks(self, name: str) -> Tensor:
        """The bytes of a matrix that is rows of one tensor, uint8 (rows, bytes of a row), in the parameter's order."""
        parameter = self.parameters[name]
        assert isinstance(parameter, Rows)
        return parameter.blocks(self._read, 0, parameter.shape[0])

    def stored_bytes(self, name: str) -> int:
        """Bytes of such a matrix as it lies."""
        parameter = self.parameters[name]
        assert isinstance(parameter, Rows)
        return parameter.tensor.nbytes

    def in_place(self, name: str, expert: int, at: int) -> list[Segment]:
        """Where the bytes of `name` of one expert lie, to be placed at byte `at` of an extent and on."""
        parameter = self.parameters[name]
        assert isinstance(parameter, Stacked)
        segments = []
        for tensor in parameter.tensors:
            nbytes = tensor.nbytes // tensor.shape[0]
            segments.append(Segment(str(tensor.file), tensor.offset + expert * nbytes, nbytes, at))
            at += nbytes
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
