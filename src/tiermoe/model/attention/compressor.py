"""Compressed positions (DeepSeek-V4): an entry stands for several positions in a row, and attention takes it in their
place. With it the indexer that chooses the entries that a token attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.batch import Row
from tiermoe.model.attention.indexer import best_keys
from tiermoe.model.cache.kv import LayerShape
from tiermoe.model.cache.memory import read_rows, write_rows
from tiermoe.model.linear import Linear
from tiermoe.model.norms import Norm
from tiermoe.model.rotary import Rotary, rope_last
from tiermoe.model.step import Step
from tiermoe.model.weights import Scope
from tiermoe.types import Workload

_FLOAT_BYTES = 4
_COPIES = 5  # of the values and gates of tokens, as float32, while their entries are made; counted


@dataclass(frozen=True, slots=True)
class CompressorSizes:
    """The description of a `Compressor`."""

    rate: int  # positions of an entry
    columns: int  # of an entry
    overlaps: bool  # an entry is made of the positions before its own too, as many

    @property
    def width(self) -> int:
        """Columns of a position's values, and of its gates; where entries overlap those for the next entry come first,
        those for its own behind them."""
        return self.columns * (2 if self.overlaps else 1)

    @property
    def shapes(self) -> tuple[LayerShape, LayerShape]:
        """What the cache keeps: values and gates of the last positions, which the next entry is made of, and the
        entries."""
        kept = LayerShape(1, 2 * self.width, 0, window=self.rate * (2 if self.overlaps else 1))
        return kept, LayerShape(1, self.columns, 0, stride=self.rate)

    def nbytes(self, load: Workload) -> int:
        """Workspace of one step."""
        return (load.tokens + 2 * self.rate) * 2 * self.width * _COPIES * _FLOAT_BYTES


def compressor(w: Scope, sizes: CompressorSizes) -> Compressor:
    """The compressor with the weights of `w`."""
    value, gate = w.linear("kv_proj", sizes.width, w.hidden), w.linear("gate_proj", sizes.width, w.hidden)
    bias = w.tensor("position_bias", sizes.rate, sizes.width)
    return Compressor(sizes, value, gate, bias, w.norm("kv_norm", sizes.columns))


@dataclass(frozen=True, slots=True)
class Compressor:
    """Makes entries of positions: the sum of their values, weighed in each column by the softmax of their gates, and
    rotated by the angles of the entry's first position. Values are normed before (GLM-5 Next), or entries."""

    sizes: CompressorSizes
    value: Linear  # hidden → width
    gate: Linear  # hidden → width
    bias: Tensor  # (rate, width), of the gates
    norm: Norm | None = None  # of an entry
    value_norm: Norm | None = None

    @property
    def batch_invariant(self) -> bool:
        """Whether what is kept of a token does not depend on the other tokens of a call of up to FEW_TOKENS."""
        return self.value.batch_invariant and self.gate.batch_invariant

    def __call__(self, x: Tensor, places: range, step: Step, rotary: Rotary) -> None:
        """x (T, H), normed: writes what the cache keeps of the step's tokens, and the entries that end with them.
        places: of `sizes.shapes` in the cache."""
        values = self.value(x) if self.value_norm is None else self.value_norm(self.value(x))
        new = torch.cat((values, self.gate(x)), dim=-1)[:, None]
        kept, entries = (step.cache.keys[place] for place in places)
        for span in step.apart:
            write_rows(kept, span.row, new[span.begin : span.end])
            begin, end = span.row.first // self.sizes.rate, span.row.end // self.sizes.rate
            if begin < end:
                entries[span.row.slab, 0, begin:end] = self._entries(kept, span.row, begin, end, rotary)

    def _entries(self, kept: Tensor, row: Row, begin: int, end: int, rotary: Rotary) -> Tensor:
        """Entries `begin` to `end`, (n, columns), the last of which ends within the row."""
        rate, columns, overlaps = self.sizes.rate, self.sizes.columns, self.sizes.overlaps
        first = max(0, begin - overlaps) * rate
        rows = read_rows(kept, row, row.first - first + 1)[0, : end * rate - first]
        values, gates = rows.view(-1, rate, 2, self.sizes.width).unbind(2)
        gates = gates + self.bias
        if overlaps:  # nothing comes before the first entry
            values = torch.cat((_later(values[..., :columns], 0.0), values[..., columns:]), dim=1)
            gates = torch.cat((_later(gates[..., :columns], float("-inf")), gates[..., columns:]), dim=1)
        weights = torch.softmax(gates[begin - end :], dim=1, dtype=torch.float32).to(values.dtype)
        entries = (values[begin - end :] * weights).sum(dim=1)
        entries = entries if self.norm is None else self.norm(entries)
        cos, sin = rotary.at(torch.arange(begin * rate, end * rate, rate), row.end)
        return rope_last(entries[:, None], cos, sin)[:, 0]


def _later(x: Tensor, before: float) -> Tensor:
    """x (n, rate, columns) an entry later, and before it a number."""
    return F.pad(x, (0, 0, 0, 0, 1, 0), value=before)[:-1]


@dataclass(frozen=True, slots=True)
class EntryIndexerSizes:
    """The description of an `EntryIndexer`."""

    heads: int
    most: int  # entries that a token attends to
    keys: CompressorSizes

    def nbytes(self, load: Workload) -> int:
        """Workspace of one sequence: keys and scores as float32, and the tokens' queries."""
        entries = load.context // self.keys.rate
        queries = load.tokens * self.heads * (self.keys.columns * (3 * load.itemsize + _FLOAT_BYTES) + _FLOAT_BYTES)
        return entries * _FLOAT_BYTES * (self.keys.columns + 2 * self.heads + 4) + queries + self.keys.nbytes(load)


def entry_indexer(w: Scope, sizes: EntryIndexerSizes, narrow: int) -> EntryIndexer:
    """The indexer with the weights of `w`. narrow: columns of the narrow query."""
    query = w.linear("q_b_proj", sizes.heads * sizes.keys.columns, narrow)
    weigh = w.linear("scorer.weights_proj", sizes.heads, w.hidden)
    return EntryIndexer(sizes, compressor(w, sizes.keys), query, weigh)


@dataclass(frozen=True, slots=True)
class EntryIndexer:
    """Chooses the `sizes.most` entries of the largest scores, of those that end before or with a token's position, by
    keys that are entries of their own. A score is that of an `Indexer`, whose docstring says which of equal ones are
    chosen."""

    sizes: EntryIndexerSizes
    keys: Compressor
    query: Linear  # narrow query → heads * columns
    weigh: Linear  # hidden → the heads' weights

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's scores do not depend on the other tokens of a call of up to FEW_TOKENS."""
        return all(each.batch_invariant for each in (self.keys, self.query, self.weigh))

    def queries(self, x: Tensor, narrow: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x (T, H), normed, and narrow queries → queries (T, heads, columns) and weights (T, heads), float32."""
        queries = self.query(narrow).view(len(x), self.sizes.heads, -1)
        return rope_last(queries, cos, sin).float(), self.weigh(x).float() * self.sizes.heads**-0.5

    def choose(self, query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        """One token's queries (heads, columns) and weights (heads) → the places of its entries among keys (n, columns),
        ascending; all where there are no more than `sizes.most`."""
        if len(keys) <= self.sizes.most:
            return torch.arange(len(keys))
        return best_keys(query, weights, keys.float(), self.sizes.most)
