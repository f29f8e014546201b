"""A step: the batch with the tensors that all layers of a decoder share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.batch import Batch, Row
from tiermoe.kernels.attention import Step as NativeStep
from tiermoe.kernels.graphs import Graphs
from tiermoe.model.cache.kv import KVCache
from tiermoe.model.cache.recurrent import StateRows
from tiermoe.model.rotary import Rotary


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of a batch's row: `begin` .. `end` of the step's."""

    row: Row
    begin: int
    end: int


class Step:
    """A batch's tensors, for T tokens and a cache.

    spans: the tokens of each row. apart: `spans`, with one for each token that is verified: what torch computes of
    it is what it is alone. tokens, positions, slabs: int64 (T), on the cache's device. longest: tokens of the longest
    sequence, with the step's. rotaries: the rotary embeddings. angles: of each of them cos and sin, (T, columns) in the
    model's dtype; cos, sin: the first ones. temperatures: of each rotary embedding the factors of queries, float32 (T),
    or None. states: of each row the places of its recurrent states; None in a cache without them, or for a layer
    without (with_states). chosen: positions that an indexer chose (`choose`). native: of each rotary embedding the step
    for the attention kernel; empty if no kernel runs, or groups of heads attend to positions of their own. place: the
    position and the slab of a step's only token, int64 (2), where a GPU's kernels find them (`triton_attention`); None
    if there are more tokens, or the kernels do not take the cache. graphs: the tensors lie at addresses that stay from
    step to step, as these graphs need; None: anywhere. number: of the step among those of a pass, which lie apart."""

    def __init__(
        self,
        batch: Batch,
        cache: KVCache,
        *rotaries: Rotary,
        with_states: bool = True,
        graphs: Graphs | None = None,
        number: int = 0,
    ) -> None:
        self.cache, self.graphs, self.number = cache, graphs, number
        self.spans: list[Span] = []
        for row in batch.rows:
            begin = self.spans[-1].end if self.spans else 0
            self.spans.append(Span(row, begin, begin + len(row.tokens)))
        self.apart = self.spans
        if batch.verifies:
            self.apart = [
                Span(row, at, at + len(row.tokens))
                for span in self.spans
                for at, row in enumerate(span.row.one_by_one(), span.begin)
            ]
        listed = torch.tensor([batch.tokens, batch.positions, batch.slabs])
        if graphs is None:
            listed = listed.to(cache.device, non_blocking=True)  # one copy for a GPU
        else:
            (listed,) = graphs.fixed(("step", number), listed)
        self.tokens, self.positions, self.slabs = listed
        self.place = listed[1:, 0] if cache.by_place and len(batch.tokens) == 1 else None
        self.longest = max(row.end for row in batch.rows)
        self.rotaries = rotaries
        self.angles: list[tuple[Tensor, Tensor]] = []
        self.temperatures: list[Tensor | None] = []
        for at, rotary in enumerate(rotaries):
            cos, sin = rotary.at(self.positions, self.longest)
            factors = None if rotary.temperature is None else rotary.temperature(self.positions)
            if graphs is not None:
                cos, sin = graphs.fixed(("angles", number, at), cos, sin)
                factors = None if factors is None else graphs.fixed(("factors", number, at), factors)[0]
            self.angles.append((cos, sin))
            self.temperatures.append(factors)
        self.cos, self.sin = self.angles[0]
        self.chosen: Tensor | None = None
        self.native: list[NativeStep] = []
        if cache.by_kernels:
            self.native = [
                NativeStep(self.slabs, self.positions, cos, sin, None, None, factors)
                for (cos, sin), factors in zip(self.angles, self.temperatures, strict=True)
            ]
        self._native = self.native
        recurrent = cache.recurrent
        self.states: StateRows | None = None
        if recurrent is not None and with_states:
            places = [recurrent.begin(row.slab, row.first, row.end) for row in batch.rows]
            self.states = StateRows(recurrent, [(row, *of) for row, of in zip(batch.rows, places, strict=True)])

    def choose(self, chosen: Tensor | None) -> None:
        """The next layers' tokens attend to these positions of their sequences alone: int32 (T, most), ascending, and
        after them -1 if there are fewer; (T, groups, most): of each group of heads. None: to all positions."""
        changed = chosen is not None or self.chosen is not None
        if changed and (chosen is None or chosen.dim() == 2):
            self._native = [each.choosing(chosen) for each in self._native]
        self.chosen = chosen
        self.native = self._native if chosen is None or chosen.dim() == 2 else []
