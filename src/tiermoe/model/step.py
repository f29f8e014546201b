"""A step: the batch with the tensors that all layers of a decoder share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tiermoe.batch import Batch, Kind, Row
from tiermoe.kernels.attention import Step as NativeStep
from tiermoe.kernels.delta import delta_rows
from tiermoe.model.kv_cache import KVCache
from tiermoe.model.rotary import Rotary
from tiermoe.native import available
from tiermoe.types import FEW_TOKENS

Three = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of a batch's row: `begin` .. `end` of the step's."""

    row: Row
    begin: int
    end: int


class Step:
    """A batch's tensors, for T tokens and a cache.

    spans: the tokens of each row. parts: spans of what is computed by itself where a kernel does not compute all tokens
    at once: rows, and each token that is verified. tokens, positions, slabs: int64 (T). longest: tokens of the longest
    sequence, with the step's. rotaries: the rotary embeddings. angles: of each of them cos and sin, (T, columns) in the
    model's dtype; cos, sin: the first ones.
    temperatures: of each rotary embedding the factors of queries, float32 (T), or None. states: of each row (place of
    the recurrent state before the step, place of the state after it), empty in a cache without them; pieces: the same
    for the kernel of linear attention. chosen: positions that an indexer chose (`choose`)."""

    def __init__(self, batch: Batch, cache: KVCache, *rotaries: Rotary) -> None:
        self.cache = cache
        self.spans: list[Span] = []
        for row in batch.rows:
            begin = self.spans[-1].end if self.spans else 0
            self.spans.append(Span(row, begin, begin + len(row.tokens)))
        self.parts = [
            Span(each, span.begin + each.first - span.row.first, span.begin + each.end - span.row.first)
            for span in self.spans
            for each in span.row.one_by_one()
        ]
        self.tokens = torch.tensor(batch.tokens)
        self.positions = torch.tensor(batch.positions)
        self.slabs = torch.tensor(batch.slabs)
        self.longest = max(row.end for row in batch.rows)
        self.rotaries = rotaries
        self.angles = [self._angles_of(rotary) for rotary in rotaries]
        self.cos, self.sin = self.angles[0]
        self.temperatures = [
            None if rotary.temperature is None else rotary.temperature(self.positions) for rotary in rotaries
        ]
        self.chosen: Tensor | None = None
        self._native: list[NativeStep] = []
        if len(batch.tokens) <= FEW_TOKENS and available() and cache.dtype == torch.bfloat16:
            given = None
            if batch.phase == "prefill":
                given = torch.tensor([row.kind is Kind.PROMPT for row in batch.rows for _ in row.tokens])
            self._native = [
                NativeStep(self.slabs, self.positions, cos.bfloat16(), sin.bfloat16(), None, None, factors, given)
                for (cos, sin), factors in zip(self.angles, self.temperatures, strict=True)
            ]
        recurrent = cache.recurrent
        self.states = [] if recurrent is None else [recurrent.begin(row.slab, row.first, row.end) for row in batch.rows]
        lengths = [len(row.tokens) for row in batch.rows]
        self.pieces = list(delta_rows([(length, *of) for length, of in zip(lengths, self.states, strict=False)]))

    @property
    def native(self) -> list[NativeStep]:
        """Of each rotary embedding the step for the attention kernel of up to FEW_TOKENS; empty where no kernel runs,
        or groups of heads attend to positions of their own."""
        return [] if self.chosen is not None and self.chosen.dim() == 3 else self._native

    def choose(self, chosen: Tensor | None) -> None:
        """The next layers' tokens attend to these positions of their sequences alone: int32 (T, most), ascending, and
        behind them -1 where there are fewer; (T, groups, most): of each group of heads. None: to all positions."""
        changed = chosen is not None or self.chosen is not None
        if changed and (chosen is None or chosen.dim() == 2):
            self._native = [each.choosing(chosen) for each in self._native]
        self.chosen = chosen

    def each_part(self, compute: Callable[[Tensor], Three], x: Tensor) -> Three:
        """compute(x), x (T, ...), whose tokens have the bits that those of each part have by themselves."""
        if len(self.parts) == 1:
            return compute(x)
        first, second, third = zip(*(compute(x[part.begin : part.end]) for part in self.parts), strict=True)
        return torch.cat(first), torch.cat(second), torch.cat(third)

    def _angles_of(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """cos and sin of a rotary embedding. A part's angles depend on the length of its own sequence alone."""
        if len(self.parts) == 1 or len({rotary.scale(part.row.end) for part in self.parts}) == 1:
            return rotary.at(self.positions, self.longest)
        each = [rotary.at(self.positions[part.begin : part.end], part.row.end) for part in self.parts]
        return torch.cat([cos for cos, _ in each]), torch.cat([sin for _, sin in each])
