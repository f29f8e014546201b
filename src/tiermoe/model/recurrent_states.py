"""Recurrent states of sequences: what layers of linear attention and short convolutions keep in the place of keys and
values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.model.kv_memory import empty_pages, release_pages

KEPT = 2  # states of a sequence: after the last step and before it
_NONE = -1
_TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes of one layer's state of a sequence, whatever the sequence's length."""

    inputs: int  # last inputs of the convolution, in the model's dtype
    channels: int  # of the convolution
    heads: int  # each with a float32 matrix (key columns, value columns)
    key_columns: int
    value_columns: int
    ngram_inputs: int = 0  # last inputs of the convolution of n-gram features, in the model's dtype
    ngram_channels: int = 0  # of that convolution
    tokens: int = 0  # last tokens, of which n-grams are made

    def nbytes(self, itemsize: int) -> int:
        """Bytes of a sequence's `KEPT` states."""
        return sum(self.parts(itemsize))

    def parts(self, itemsize: int) -> list[int]:
        """Bytes of each of a sequence's tensors, in the order of `RecurrentStates.tensors`."""
        matrices = 4 * self.heads * self.key_columns * self.value_columns
        inputs, ngrams = self.inputs * self.channels, self.ngram_inputs * self.ngram_channels
        return [KEPT * each for each in (inputs * itemsize, matrices, ngrams * itemsize, _TOKEN_BYTES * self.tokens)]


class RecurrentStates:
    """States of `slabs` sequences in the layers that have one (layer → shape). A chunk reads one of a sequence's two
    states and writes the other, so a step of one chunk that fails, or is rolled back, leaves the state that it began
    with. A step of several chunks leaves those after its last two, and none where it fails.

    inputs: layer → (slabs, 2, inputs, channels). states: layer → (slabs, 2, heads, key columns, value columns).
    ngram_inputs: layer → (slabs, 2, inputs, channels). tokens: layer → (slabs, 2, tokens), one more than a token's id,
    0 where there is none.
    lengths: slab → the number of tokens after which each of the two states is, -1 for an unused one."""

    def __init__(self, shapes: dict[int, StateShape], slabs: int, dtype: torch.dtype) -> None:
        self.inputs = {
            layer: empty_pages((slabs, KEPT, shape.inputs, shape.channels), dtype) for layer, shape in shapes.items()
        }
        self.states = {
            layer: empty_pages((slabs, KEPT, shape.heads, shape.key_columns, shape.value_columns), torch.float32)
            for layer, shape in shapes.items()
        }
        self.ngram_inputs = {
            layer: empty_pages((slabs, KEPT, shape.ngram_inputs, shape.ngram_channels), dtype)
            for layer, shape in shapes.items()
        }
        self.tokens = {layer: empty_pages((slabs, KEPT, shape.tokens), torch.int64) for layer, shape in shapes.items()}
        self.lengths = [[_NONE] * KEPT for _ in range(slabs)]
        self._coming = [list(lengths) for lengths in self.lengths]  # `lengths` when the running step has ended

    @property
    def tensors(self) -> dict[str, dict[int, Tensor]]:
        """Name → layer → what is kept."""
        return {
            "inputs": self.inputs, "states": self.states, "ngram_inputs": self.ngram_inputs, "tokens": self.tokens,
        }  # fmt: skip

    def ends(self, slab: int) -> list[int]:
        """The numbers of tokens after which a state of the sequence is kept."""
        return [length for length in self.lengths[slab] if length != _NONE]

    def clear(self, slab: int) -> None:
        """Makes the sequence an empty one."""
        for kept in self._all():
            kept[slab, 0] = 0
        self.lengths[slab] = [0, *[_NONE] * (KEPT - 1)]

    def release(self, slab: int) -> None:
        """Gives the sequence's memory back."""
        for kept in self._all():
            release_pages(kept, slab)

    def begin_write(self, slab: int) -> None:
        """Begins a step, of one chunk or several."""
        self._coming[slab] = list(self.lengths[slab])

    def begin(self, slab: int, first: int, end: int) -> tuple[int, int]:
        """Begins a chunk of the tokens from position `first` to `end`: (place of the state before them, place of the
        state after them) among all of a layer's. ValueError where no state is kept from before them."""
        if not first and first not in self._coming[slab]:
            self.clear(slab)
            self.begin_write(slab)
        if first not in self._coming[slab]:
            raise ValueError(f"a recurrent state of {self.ends(slab)} tokens cannot go on from position {first}")
        before = self._coming[slab].index(first)
        after = 1 - before
        self._coming[slab][after] = end
        self.lengths[slab][after] = _NONE
        return KEPT * slab + before, KEPT * slab + after

    def end_write(self, slab: int) -> None:
        """Ends the step."""
        self.lengths[slab] = list(self._coming[slab])

    def crop(self, slab: int, length: int) -> None:
        """Forgets the states after more than `length` tokens, which is one of `ends`, or 0."""
        if not length and length not in self.lengths[slab]:
            self.clear(slab)
        self.lengths[slab] = [end if end <= length else _NONE for end in self.lengths[slab]]

    def memory(self, slab: int, length: int) -> Iterator[memoryview]:
        """The memory of the state after `length` tokens, as bytes, in an order that follows from the shapes alone;
        nothing where no such state is kept."""
        lengths = list(self.lengths[slab])  # a step may change them meanwhile
        if length in lengths:
            at = lengths.index(length)
            for kept in self._all():
                if kept.numel():
                    yield kept[slab, at].flatten().view(torch.uint8).numpy().data

    def filled(self, slab: int, length: int) -> None:
        """Declares the one state of an empty sequence to be the state after `length` tokens; `memory` yields its
        place."""
        if not length:
            self.clear(slab)
        self.lengths[slab] = [length, *[_NONE] * (KEPT - 1)]

    def copy(self, slab: int, other: int) -> None:
        """Copies the states of `slab` to slab `other`."""
        for kept in self._all():
            kept[other] = kept[slab]
        self.lengths[other] = list(self.lengths[slab])

    def select(self, chosen: Sequence[int]) -> None:
        """The sequence of slab i becomes that of slab chosen[i]."""
        for kept in self._all():
            kept[: len(chosen)] = kept[list(chosen)]
        self.lengths[: len(chosen)] = [list(self.lengths[slab]) for slab in chosen]

    def _all(self) -> list[Tensor]:
        return [tensor for layers in self.tensors.values() for tensor in layers.values()]
