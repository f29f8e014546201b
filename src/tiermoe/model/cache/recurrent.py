"""Recurrent states of sequences: what layers of linear attention and short convolutions keep in the place of keys and
values.

A step of tokens that are verified leaves the state after all of them and the one before them. It also leaves what the
states' update takes of each token, which is little beside a state. Where some of the tokens were wrong, `crop` updates
the state before them by the right ones again: the same operations in the same order, and so the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.batch import Kind, Row
from tiermoe.kernels.convolution import state_pieces
from tiermoe.model.cache.memory import CPU, empty_pages, release_pages
from tiermoe.types import MOST_VERIFIED

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
    verified: int = 0  # columns of what the state's update takes of a token, in the model's dtype

    def nbytes(self, itemsize: int) -> int:
        """Bytes of a sequence's `KEPT` states, and of what is kept of tokens that are verified."""
        return sum(self.parts(itemsize))

    def parts(self, itemsize: int) -> list[int]:
        """Bytes of each of a sequence's tensors, in the order of `RecurrentStates.tensors`, and of `verified`."""
        matrices = 4 * self.heads * self.key_columns * self.value_columns
        inputs, ngrams = self.inputs * self.channels, self.ngram_inputs * self.ngram_channels
        states = [KEPT * each for each in (inputs * itemsize, matrices, ngrams * itemsize, _TOKEN_BYTES * self.tokens)]
        return [*states, *(MOST_VERIFIED * each * itemsize for each in (self.verified, self.ngram_channels))]


@dataclass(frozen=True, slots=True)
class StateRow:
    """A row on its way through a layer that keeps states: its tokens are `begin` .. `end` of those that are computed;
    the states before and after it lie at these places among all of a layer's, which may be one place."""

    row: Row
    begin: int
    end: int
    before: int
    after: int

    def append(self, states: Tensor, new: Tensor) -> Tensor:
        """new (T, ..) after the last ones before it, states (places, n, ..): (n + T, ..), of which the last n are left
        as the state after the row."""
        whole = torch.cat((states[self.before], new))
        states[self.after] = whole[len(new) :]
        return whole


class StateRows:
    """All rows of a step, or a row that is replayed. verified: those whose tokens may be replayed in part. pieces: the
    rows as the kernels take them."""

    def __init__(self, recurrent: RecurrentStates, rows: Iterable[tuple[Row, int, int]]) -> None:
        self.recurrent = recurrent
        self.rows: list[StateRow] = []
        for row, before, after in rows:
            begin = self.rows[-1].end if self.rows else 0
            self.rows.append(StateRow(row, begin, begin + len(row.tokens), before, after))
        self.verified = [
            each for each in self.rows if each.row.kind is Kind.VERIFY and len(each.row.tokens) <= MOST_VERIFIED
        ]
        spans = [(each.end - each.begin, each.before, each.after, each.row.kind is Kind.PROMPT) for each in self.rows]
        self.pieces = list(state_pieces(spans))


Replay = Callable[[Tensor, int, StateRows], None]
"""replay(kept, layer, rows) updates the states of a layer by a row of T tokens, of which it has kept (T, columns)."""


class RecurrentStates:
    """States of `slabs` sequences in the layers that have one (layer → shape). A chunk reads one of a sequence's two
    states and writes the other, so a step of one chunk that fails, or is rolled back, leaves the state that it began
    with. A step of several chunks leaves those after its last two, and none if it fails.

    inputs: layer → (slabs, 2, inputs, channels). states: layer → (slabs, 2, heads, key columns, value columns).
    ngram_inputs: layer → (slabs, 2, inputs, channels). tokens: layer → (slabs, 2, tokens), one more than a token's id,
    0 if there is none.
    lengths: slab → the number of tokens after which each of the two states is, -1 for an unused one.
    verified, verified_ngrams: layer → (slabs, MOST_VERIFIED, columns), what the updates take of tokens of a sequence's
    last step."""

    def __init__(
        self, shapes: dict[int, StateShape], slabs: int, dtype: torch.dtype, device: torch.device = CPU
    ) -> None:
        def tensors(
            rows: int, sizes: Callable[[StateShape], tuple[int, ...]], of: torch.dtype = dtype
        ) -> dict[int, Tensor]:
            return {layer: empty_pages((slabs, rows, *sizes(shape)), of, device) for layer, shape in shapes.items()}

        self.inputs = tensors(KEPT, lambda shape: (shape.inputs, shape.channels))
        self.states = tensors(KEPT, lambda shape: (shape.heads, shape.key_columns, shape.value_columns), torch.float32)
        self.ngram_inputs = tensors(KEPT, lambda shape: (shape.ngram_inputs, shape.ngram_channels))
        self.tokens = tensors(KEPT, lambda shape: (shape.tokens,), torch.int64)
        self.verified = tensors(MOST_VERIFIED, lambda shape: (shape.verified,))
        self.verified_ngrams = tensors(MOST_VERIFIED, lambda shape: (shape.ngram_channels,))
        self._verified: dict[int, Row] = {}  # slab → the row of its last step, where that can run again in part
        self._replays: list[dict[int, Replay]] = [{}, {}]  # of `verified` and of `verified_ngrams`
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
        self._verified.pop(slab, None)
        self.lengths[slab] = [0, *[_NONE] * (KEPT - 1)]

    def release(self, slab: int) -> None:
        """Gives the sequence's memory back."""
        for kept in (*self._all(), *self.verified.values(), *self.verified_ngrams.values()):
            release_pages(kept, slab)

    def begin_write(self, slab: int) -> None:
        """Begins a step, of one chunk or several."""
        self._verified.pop(slab, None)
        self._coming[slab] = list(self.lengths[slab])

    def begin(self, slab: int, first: int, end: int) -> tuple[int, int]:
        """Begins a chunk of the tokens from position `first` to `end`: (place of the state before them, place of the
        state after them) among all of a layer's. ValueError if no state is kept from before them."""
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

    def keep(self, layer: int, rows: StateRows, replay: Replay, *taken: Tensor, ngrams: bool = False) -> None:
        """Keeps what `replay` takes of tokens of a step that are verified: taken (T, ..) of all its tokens, side by
        side. ngrams: what n-gram features take."""
        kept = (self.verified_ngrams if ngrams else self.verified)[layer]
        for each in rows.verified:
            slab, count = each.row.slab, len(each.row.tokens)
            torch.cat([one[each.begin : each.end] for one in taken], dim=1, out=kept[slab, :count])
            self._verified[slab] = each.row
            self._replays[ngrams][layer] = replay

    def can_replay(self, slab: int, length: int) -> bool:
        """Whether `length` is amid the tokens that the sequence's last step verified."""
        row = self._verified.get(slab)
        if row is None or len(self._replays[0]) < len(self.states):  # not every layer has kept what its update takes
            return False
        return row.first < length < row.end and {row.first, row.end} <= set(self.lengths[slab])

    def crop(self, slab: int, length: int) -> None:
        """Forgets the states after more than `length` tokens, which is one of `ends`, or 0, or one that it
        `can_replay`."""
        if length not in self.lengths[slab]:
            if length:
                self._replay(slab, length)
            else:
                self.clear(slab)
        self.lengths[slab] = [end if end <= length else _NONE for end in self.lengths[slab]]

    @torch.no_grad()
    def _replay(self, slab: int, length: int) -> None:
        """Makes the state before the last step's tokens the one after `length` tokens."""
        last = self._verified.pop(slab)
        row = Row(slab, last.first, last.tokens[: length - last.first], last.kind)
        at = self.lengths[slab].index(row.first)
        self.lengths[slab] = [_NONE] * KEPT  # who reads a state meanwhile finds that it has gone
        rows = StateRows(self, [(row, KEPT * slab + at, KEPT * slab + at)])
        for kept, replays in zip((self.verified, self.verified_ngrams), self._replays, strict=True):
            for layer, replay in replays.items():
                replay(kept[layer][slab, : len(row.tokens)], layer, rows)
        self.lengths[slab][at] = length

    def memory(self, slab: int, length: int) -> Iterator[memoryview]:
        """The memory of the state after `length` tokens, as bytes, in an order that follows from the shapes alone;
        nothing if no such state is kept."""
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
        """Copies the states of `slab` to the empty slab `other`."""
        for kept in self._all():
            kept[other] = kept[slab]
        self.lengths[other] = list(self.lengths[slab])

    def select(self, chosen: Sequence[int]) -> None:
        """The sequence of slab i becomes that of slab chosen[i]."""
        for kept in self._all():
            kept[: len(chosen)] = kept[list(chosen)]
        self._verified.clear()
        self.lengths[: len(chosen)] = [list(self.lengths[slab]) for slab in chosen]

    def _all(self) -> list[Tensor]:
        return [tensor for layers in self.tensors.values() for tensor in layers.values()]
