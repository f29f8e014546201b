"""Preallocated, page-aligned slots for experts in main memory."""

from __future__ import annotations

import mmap

import numpy as np
import torch

from tiermoe.errors import BudgetError
from tiermoe.store.layout import PAGE, align


class HostSlots:
    """`count` slots of `slot_bytes` (rounded up to 4 KiB) in anonymous memory, outside malloc: pages are taken from
    the system when first written and O_DIRECT reads go straight into them. `pin` locks them for copies to a GPU."""

    def __init__(self, count: int, slot_bytes: int, pin: bool = False) -> None:
        self.count = count
        self.slot_bytes = align(slot_bytes, PAGE)
        try:
            self._memory = mmap.mmap(-1, count * self.slot_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise BudgetError(f"cannot reserve {count} slots of {self.slot_bytes:,} bytes: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._tensor = torch.from_numpy(np.frombuffer(self._memory, dtype=np.uint8))
        if pin:
            _register_with_cuda(self._tensor)

    def buffer(self, slot: int) -> torch.Tensor:
        """Slot `slot` as uint8 (slot_bytes,)."""
        return self._tensor[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]


def _register_with_cuda(tensor: torch.Tensor) -> None:
    status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
    if int(status) != 0:
        raise BudgetError(
            f"the GPU driver refused to pin {tensor.numel():,} bytes of host memory (status {int(status)}); "
            f"lower --memory or --cache"
        )
