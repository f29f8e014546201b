"""What layers of linear attention keep of a sequence: not its tokens, but what became of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.model import kv_pages

KEPT = 2  # states of a sequence: after its last step and before it
_NONE = -1


@dataclass(frozen=True, slots=True)
class StateShape:
    """What one layer keeps, whatever the length: the last `inputs` inputs of a convolution over `channels`, in the
    model's dtype, and for each of `heads` a matrix (key columns, value columns), float32."""

    inputs: int
    channels: int
    heads: int
    key_columns: int
    value_columns: int

    def nbytes(self, itemsize: int) -> int:
        """Bytes of a sequence, of all states that are kept."""
        return sum(self.parts(itemsize))

    def parts(self, itemsize: int) -> tuple[int, int]:
        """Bytes of a sequence's inputs and of its matrices."""
        matrices = 4 * self.heads * self.key_columns * self.value_columns
        return KEPT * self.inputs * self.channels * itemsize, KEPT * matrices


class RecurrentStates:
    """Of the layers that have them (layer → shape), for `slabs` sequences. A step reads one of a sequence's two states
    and writes the other: a step that fails, or whose last tokens are taken back, leaves what it began with.

    `inputs[layer]` (slabs, 2, inputs, channels) and `states[layer]` (slabs, 2, heads, key columns, value columns).
    `lengths[slab]`: after how many tokens of its sequence each of the two is, -1 where it is of no use."""

    def __init__(self, shapes: dict[int, StateShape], slabs: int, dtype: torch.dtype) -> None:
        self.inputs = {
            layer: kv_pages.empty((slabs, KEPT, its.inputs, its.channels), dtype) for layer, its in shapes.items()
        }
        self.states = {
            layer: kv_pages.empty((slabs, KEPT, its.heads, its.key_columns, its.value_columns), torch.float32)
            for layer, its in shapes.items()
        }
        self.lengths = [[_NONE] * KEPT for _ in range(slabs)]
        self._written = [0] * slabs

    @property
    def tensors(self) -> dict[str, dict[int, Tensor]]:
        """Name → layer → what is kept."""
        return {"inputs": self.inputs, "states": self.states}

    def ends(self, slab: int) -> list[int]:
        """After how many tokens of its sequence a state is kept."""
        return [length for length in self.lengths[slab] if length != _NONE]

    def clear(self, slab: int) -> None:
        """Makes the sequence an empty one."""
        for kept in self._all():
            kept[slab, 0] = 0
        self.lengths[slab] = [0, *[_NONE] * (KEPT - 1)]

    def release(self, slab: int) -> None:
        """Gives the sequence's memory back."""
        for kept in self._all():
            kv_pages.release(kept, slab)

    def begin(self, slab: int, first: int) -> tuple[int, int]:
        """A step has tokens from position `first` on: where the state before them lies among all of a layer's, and
        where the one after them goes. ValueError where none is kept from before them."""
        if not first and first not in self.lengths[slab]:
            self.clear(slab)
        if first not in self.lengths[slab]:
            raise ValueError(f"a recurrent state of {self.ends(slab)} tokens cannot go on from position {first}")
        before = self.lengths[slab].index(first)
        after = self._written[slab] = 1 - before
        self.lengths[slab][after] = _NONE
        return KEPT * slab + before, KEPT * slab + after

    def wrote(self, slab: int, end: int) -> None:
        """The step has ended, and the sequence has `end` tokens."""
        self.lengths[slab][self._written[slab]] = end

    def crop(self, slab: int, length: int) -> None:
        """Goes on from the state after `length` tokens, one of `ends`, or from nothing."""
        if not length and length not in self.lengths[slab]:
            self.clear(slab)
        self.lengths[slab] = [its if its <= length else _NONE for its in self.lengths[slab]]

    def memory(self, slab: int, length: int) -> Iterator[memoryview]:
        """Where the state after `length` tokens of the sequence lies, as bytes, in an order that follows from the
        shapes alone; nothing where none is kept."""
        lengths = list(self.lengths[slab])  # a step may change them meanwhile
        if length in lengths:
            at = lengths.index(length)
            for kept in self._all():
                if kept.numel():
                    yield kept[slab, at].flatten().view(torch.uint8).numpy().data

    def filled(self, slab: int, length: int) -> None:
        """The one state of an empty sequence, which `memory` then tells the place of, is the one after `length` tokens
        from now on."""
        if not length:
            self.clear(slab)
        self.lengths[slab] = [length, *[_NONE] * (KEPT - 1)]

    def copy(self, slab: int, other: int) -> None:
        """Makes what is kept of slab `other` equal to that of `slab`."""
        for kept in self._all():
            kept[other] = kept[slab]
        self.lengths[other] = list(self.lengths[slab])

    def select(self, chosen: Sequence[int]) -> None:
        """The sequence of slab i becomes that of slab chosen[i]."""
        for kept in self._all():
            kept[: len(chosen)] = kept[list(chosen)]
        self.lengths[: len(chosen)] = [list(self.lengths[slab]) for slab in chosen]

    def _all(self) -> list[Tensor]:
        return [*self.inputs.values(), *self.states.values()]
