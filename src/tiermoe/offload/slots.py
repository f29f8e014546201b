"""Slots for experts, preallocated and page-aligned: in main memory and on a GPU."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch

from tiermoe.errors import BudgetError
from tiermoe.formats.expert_format import PAGE, align
from tiermoe.offload.cuda import GpuErrors, pin_memory, unpin_memory
from tiermoe.platform.process_memory import anonymous_memory
from tiermoe.types import ExpertKey


class Slots(Protocol):
    """Memory for experts."""

    def buffer(self, slot: int) -> torch.Tensor:
        """Slot `slot` as a uint8 tensor."""

    def close(self) -> None:
        """Gives the memory back once no view of a slot is left."""


class FilledSlots(Slots, Protocol):
    """Slots that I/O threads fill."""

    def place(self, slot: int, key: ExpertKey) -> torch.Tensor:
        """Where expert `key` is brought for slot `slot`, uint8 and page-aligned: `buffer(slot)` once it is there."""

    def address(self, slot: int, key: ExpertKey) -> int:
        """Where `place(slot, key)` begins."""


class _Run:
    """`count` slots of `slot_bytes` in one uint8 tensor, the first at the address `first`."""

    def __init__(self, tensor: torch.Tensor, count: int, slot_bytes: int) -> None:
        self.count, self.slot_bytes = count, slot_bytes
        self.first = tensor.data_ptr()
        self._tensor = tensor

    def buffer(self, slot: int) -> torch.Tensor:
        """Slot `slot` as uint8 (slot_bytes,)."""
        return self._tensor[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def address(self, slot: int, key: ExpertKey) -> int:
        return self.first + slot * self.slot_bytes

    def close(self) -> None:
        """Gives the memory back; views of slots keep it alive."""
        del self._tensor


class HostSlots(_Run):
    """`count` slots of `slot_bytes` (rounded up to 4 KiB) in anonymous memory, outside malloc: pages come
    from the system when first written and O_DIRECT reads go straight into them. `pin` locks them, all pages
    at once, for copies to a GPU. shared: the slots share fewer bytes than they have addresses for, in pages of
    the smallest size. BudgetError if the system refuses."""

    def __init__(self, count: int, slot_bytes: int, pin: bool = False, shared: bool = False) -> None:
        slot_bytes = align(slot_bytes, PAGE)
        try:
            memory = anonymous_memory(count * slot_bytes, huge=not shared)
        except (OSError, ValueError, OverflowError) as error:
            message = f"cannot reserve {count} slots of {slot_bytes:,} bytes: {error}"
            raise BudgetError(message) from error
        super().__init__(torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)), count, slot_bytes)
        self._pinned = pin
        if pin:
            pin_memory(self._tensor)

    def place(self, slot: int, key: ExpertKey) -> torch.Tensor:
        """Where the expert is to be written: the slot itself, whatever the expert."""
        return self.buffer(slot)

    def close(self) -> None:
        """Gives the memory back once no view of a slot is left. No copy may be under way."""
        if self._pinned:
            unpin_memory(self._tensor)
        super().close()


class SlotRuns:
    """Runs of equal slots one after the other, numbered through."""

    def __init__(self, runs: Sequence[_Run]) -> None:
        self._runs = list(runs)
        self._firsts = [0, *accumulate(run.count for run in runs)]

    def buffer(self, slot: int) -> torch.Tensor:
        """Slot `slot` as uint8, of its run's size."""
        run = bisect_right(self._firsts, slot) - 1
        return self._runs[run].buffer(slot - self._firsts[run])

    def address(self, slot: int, key: ExpertKey) -> int:
        at = bisect_right(self._firsts, slot) - 1
        run = self._runs[at]
        return run.first + (slot - self._firsts[at]) * run.slot_bytes

    def place(self, slot: int, key: ExpertKey) -> torch.Tensor:
        """Where the expert is to be written: the slot itself, whatever the expert."""
        return self.buffer(slot)

    def close(self) -> None:
        """Gives the memory back once no view of a slot is left."""
        for run in self._runs:
            run.close()
        self._runs.clear()


class DeviceSlots(_Run):
    """`count` slots of `slot_bytes` (rounded up to 4 KiB) in one uint8 tensor on `device`. BudgetError if it has no
    room."""

    def __init__(self, count: int, slot_bytes: int, device: str) -> None:
        slot_bytes = align(slot_bytes, PAGE)
        with GpuErrors(device, f"making {count} slots of {slot_bytes:,} bytes"):
            tensor = torch.empty(count * slot_bytes, dtype=torch.uint8, device=device)
        super().__init__(tensor, count, slot_bytes)
