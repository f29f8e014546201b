"""Buffers that are used again, so that decoding a matrix allocates nothing.

Fresh memory of megabytes costs more than the arithmetic on it: the system maps and clears it page by page. Prefill of
the widened reference model took 5.5 s for 512 tokens with fresh temporaries, 2.4 s without
(notebook/2026-11-21-native-kernels.md).
"""

from __future__ import annotations

import math
import threading

import torch


class Scratch(threading.local):
    """Named buffers of the calling thread. A buffer's contents last until its name is taken again."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def clear(self) -> None:
        """Frees the calling thread's buffers."""
        self._buffers.clear()

    def address(self, name: str, nbytes: int) -> int:
        """The address of the name's buffer, grown where it is too small: for code that needs no tensor."""
        return self._buffer(name, nbytes).data_ptr()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor; grown where the name's buffer is too small."""
        nbytes = math.prod(shape) * dtype.itemsize
        return self._buffer(name, nbytes)[:nbytes].view(dtype).view(shape)

    def _buffer(self, name: str, nbytes: int) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8)
        return buffer


scratch = Scratch()
