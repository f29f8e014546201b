"""Attention over a window and over compressed positions (DeepSeek-V4): all heads share one key a position, which is its
value too. Layers compress few positions into an entry, of which an indexer chooses, or many, or have a window alone.
GLM-5 Next's indexer chooses pools of positions by entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tiermoe.batch import Row
from tiermoe.model.attention.base import (
    SINK_SCORE_BYTES,
    Attention,
    AttentionSizes,
    attend_with_sinks,
    scores_at_once,
)
from tiermoe.model.attention.indexers import best_keys, block_positions, first_positions, key_norm
from tiermoe.model.cache.kv import LayerShape
from tiermoe.model.cache.memory import read_rows, write_rows
from tiermoe.model.parts import Linear, Norm, PlainLinear
from tiermoe.model.rotary import Rotary, layer_kinds, rope_last
from tiermoe.model.step import Span, Step
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
        those for its own after them."""
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
        return self.value.batch_invariant and self.gate.batch_invariant

    def __call__(self, x: Tensor, places: range, step: Step, rotary: Rotary) -> None:
        """x (T, H), normed: writes what the cache keeps of the step's tokens, and the entries that end with them.
        places: of `sizes.shapes` in the cache."""
        values = self.value(x) if self.value_norm is None else self.value_norm(self.value(x))
        new = torch.cat((values, self.gate(x)), dim=-1)[:, None]
        kept, entries = (step.cache.keys[place] for place in places)
        for span in step.spans:
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


_POSITION_BYTES = 4


@dataclass(frozen=True, slots=True)
class PoolIndexerSizes:
    """The description of a `PoolIndexer`."""

    pools: EntryIndexerSizes  # a pool's key is an entry

    @classmethod
    def of(cls, config: Any) -> PoolIndexerSizes:
        """Of all layers that have an indexer."""
        pool = config.index_kpool
        keys = CompressorSizes(pool, config.index_head_dim, overlaps=False)
        return cls(EntryIndexerSizes(config.index_n_heads, config.index_topk // pool, keys))

    @property
    def most(self) -> int:
        """Positions that a token attends to, at the most: those of its pools, and those after the last whole one."""
        pool = self.pools.keys.rate
        return self.pools.most * pool + pool - 1

    def nbytes(self, load: Workload) -> int:
        """Workspace of one sequence: that of choosing, and the positions found for all tokens of a step."""
        return self.pools.nbytes(load) + load.tokens * self.most * _POSITION_BYTES

    def kept(self, shape: LayerShape) -> LayerShape:
        """A layer's cache with what its indexer keeps."""
        return replace(shape, beside=self.pools.keys.shapes)


def pool_indexer(
    w: Scope, config: Any, *, narrow_epsilon: float | None = 1e-6, key_epsilon: float | None = 1e-6
) -> PoolIndexer:
    """The indexer of a latent attention with the weights of `w` ('self_attn'); epsilons as of `indexer`."""
    sizes, own, narrow = PoolIndexerSizes.of(config), w.at("indexer"), config.q_lora_rank
    keys = sizes.pools.keys
    made = Compressor(
        keys,
        value=own.linear("wk", keys.width, w.hidden),
        gate=PlainLinear(own.tensor("index_kpool_compress_gate", keys.width, w.hidden)),
        bias=own.tensor("index_kpool_compress_ape", keys.rate, keys.width).float(),
        value_norm=key_norm(own, keys.columns, key_epsilon),
    )
    query = own.linear("wq_b", sizes.pools.heads * keys.columns, narrow)
    weigh = own.linear("weights_proj", sizes.pools.heads, w.hidden)
    return PoolIndexer(
        sizes=sizes,
        narrow=w.linear("q_a_proj", narrow, w.hidden),
        narrow_norm=w.norm("q_a_layernorm", narrow, narrow_epsilon),
        pools=EntryIndexer(sizes.pools, made, query, weigh),
    )


@dataclass(frozen=True, slots=True)
class PoolIndexer:
    """Chooses the `sizes.pools.most` pools of the largest scores, of those that end before or with a token's own
    position; the positions after the last of them are always chosen."""

    sizes: PoolIndexerSizes
    narrow: Linear  # hidden → narrow query, with its norm
    narrow_norm: Norm
    pools: EntryIndexer

    @property
    def batch_invariant(self) -> bool:
        return self.narrow.batch_invariant and self.pools.batch_invariant

    def __call__(self, x: Tensor, layer: int, step: Step) -> None:
        """x (T, H), normed: writes the keys of the pools that end with the tokens into the step's cache, and sets the
        positions that the tokens attend to from this layer on."""
        places = step.cache.beside[layer]
        self.pools.keys(x, places, step, step.rotaries[0])
        if step.longest <= self.sizes.most:
            return step.choose(None)
        asked = self.pools.queries(x, self.narrow_norm(self.narrow(x)), step.cos, step.sin)
        chosen = first_positions(step, self.sizes.most)
        for span in step.spans:
            if span.row.end > self.sizes.most:
                self._search(*asked, step.cache.keys[places[1]][span.row.slab, 0], span, chosen)
        return step.choose(chosen)

    def _search(self, queries: Tensor, weights: Tensor, keys: Tensor, span: Span, chosen: Tensor) -> None:
        """Writes the positions of a sequence's tokens into `chosen`, ascending; keys (room, columns) of its pools."""
        pool = self.sizes.pools.keys.rate
        for token in range(span.begin, span.end):
            positions = span.row.first + token - span.begin + 1
            best = self.pools.choose(queries[token], weights[token], keys[: positions // pool])
            found = block_positions(best, pool, positions)
            chosen[token, : len(found)], chosen[token, len(found) :] = found, -1


_FEW, _MANY = "compressed_sparse_attention", "heavily_compressed_attention"
"""What configs call layers with entries of few positions, and of many."""


@dataclass(frozen=True, slots=True)
class CompressedSizes(AttentionSizes):
    """The description of a `CompressedAttention`."""

    heads: int
    columns: int  # of a head, and of the key
    rotary_columns: int  # of them, the last ones
    window: int  # the last positions that a token attends to as they are
    groups: int  # of heads, which are projected apart
    rotary: int = 0
    compressor: CompressorSizes | None = None  # None: the layer has a window alone
    indexer: EntryIndexerSizes | None = None  # None: tokens attend to all entries

    @classmethod
    def of(cls, config: Any, index: int) -> CompressedSizes:
        """Of layer `index`."""
        kind, compressor, indexer = config.layer_types[index], None, None
        if kind in (_FEW, _MANY):
            compressor = CompressorSizes(config.compress_rates[kind], config.head_dim, overlaps=kind == _FEW)
        if kind == _FEW:
            keys = CompressorSizes(config.compress_rates[kind], config.index_head_dim, overlaps=True)
            indexer = EntryIndexerSizes(config.index_n_heads, config.index_topk, keys)
        return cls(
            config.num_attention_heads,
            config.head_dim,
            config.qk_rope_head_dim,
            config.sliding_window,
            config.o_groups,
            layer_kinds(config).index("main" if compressor is None else "compress"),
            compressor,
            indexer,
        )

    @property
    def shape(self) -> LayerShape:
        kept = (self.compressor, None if self.indexer is None else self.indexer.keys)
        beside = tuple(shape for each in kept if each is not None for shape in each.shapes)
        return LayerShape(1, self.columns, 0, window=self.window, beside=beside)

    @property
    def token_columns(self) -> int:
        return self.heads * self.columns

    @property
    def rotated_columns(self) -> int:
        return self.rotary_columns

    def prompt_bytes(self, load: Workload, dtype: torch.dtype) -> int:
        """One token's scores and keys, as many as it attends to; a sequence's keys in order; what compressing and
        choosing take."""
        attended, choosing = self.window, 0
        in_order = self.window + min(load.chunk, load.context)
        if self.compressor is not None:
            entries = load.context // self.compressor.rate
            attended += entries if self.indexer is None else min(entries, self.indexer.most)
            choosing = self.compressor.nbytes(load)
        choosing += 0 if self.indexer is None else self.indexer.nbytes(load)
        keys = 2 * (attended + in_order) * self.columns * (load.itemsize + _FLOAT_BYTES)
        return scores_at_once(self.heads, 1, attended) * SINK_SCORE_BYTES + keys + choosing


def compressed(w: Scope, config: Any, index: int) -> CompressedAttention:
    """The attention of layer `index` with the weights of `w` ('self_attn')."""
    sizes, narrow = CompressedSizes.of(config, index), config.q_lora_rank
    grouped, rank = sizes.token_columns // sizes.groups, config.o_lora_rank
    groups = w.tensor("o_a_proj.weight", sizes.groups * rank, grouped).view(sizes.groups, rank, grouped)
    own = w.at("compressor")
    return CompressedAttention(
        sizes=sizes,
        narrow_query=w.linear("q_a_proj", narrow, w.hidden),
        narrow_norm=w.norm("q_a_norm", narrow),
        query=w.linear("q_b_proj", sizes.token_columns, narrow),
        query_norm=w.norm_without_weight(sizes.columns),
        key=w.linear("kv_proj", sizes.columns, w.hidden),
        key_norm=w.norm("kv_norm", sizes.columns),
        sinks=w.tensor("sinks", sizes.heads).float(),
        groups=[PlainLinear(each) for each in groups],
        output=w.linear("o_b_proj", w.hidden, sizes.groups * rank),
        compressor=None if sizes.compressor is None else compressor(own, sizes.compressor),
        indexer=None if sizes.indexer is None else entry_indexer(own.at("indexer"), sizes.indexer, narrow),
    )


@dataclass(frozen=True, slots=True)
class CompressedAttention(Attention):
    """Attention with sinks over keys that are rotated and are values too: what is attended to is rotated back by a
    token's own angles. Heads are projected in groups, and then together."""

    sizes: CompressedSizes
    narrow_query: Linear  # hidden → narrow query
    narrow_norm: Norm
    query: Linear  # narrow query → heads * columns
    query_norm: Norm  # over each head
    key: Linear  # hidden → columns
    key_norm: Norm
    sinks: Tensor  # float32 (heads)
    groups: Sequence[Linear]  # of each group: its heads' columns → the rank
    output: Linear  # groups * rank → hidden
    compressor: Compressor | None
    indexer: EntryIndexer | None

    @property
    def batch_invariant(self) -> bool:
        parts = (self.narrow_query, self.query, self.key, *self.groups, self.output, self.compressor, self.indexer)
        return all(each.batch_invariant for each in parts if each is not None)

    @property
    def chunk_invariant(self) -> bool:
        return self.batch_invariant

    def __call__(self, x: Tensor, layer: int, step: Step) -> Tensor:
        sizes, tokens = self.sizes, len(x)
        (cos, sin), rotary = step.angles[sizes.rotary], step.rotaries[sizes.rotary]
        narrow = self.narrow_norm(self.narrow_query(x))
        query = self.query_norm(self.query(narrow).view(tokens, sizes.heads, sizes.columns))
        query, key = rope_last(query, cos, sin), rope_last(self.key_norm(self.key(x))[:, None], cos, sin)
        places = step.cache.beside[layer]
        if self.compressor is not None:
            self.compressor(x, places[:2], step, rotary)
        asked: tuple[Tensor, Tensor] | None = None
        if self.indexer is not None and sizes.compressor is not None:
            self.indexer.keys(x, places[2:], step, rotary)
            if step.longest // sizes.compressor.rate > self.indexer.sizes.most:
                asked = self.indexer.queries(x, narrow, cos, sin)
        attended = torch.empty_like(query)
        for span in step.spans:
            write_rows(step.cache.keys[layer], span.row, key[span.begin : span.end])
            self._attend(query, attended, span, layer, step, asked)
        grouped = rope_last(attended, cos, -sin).view(tokens, sizes.groups, -1).unbind(1)
        projected = [each(part.contiguous()) for each, part in zip(self.groups, grouped, strict=True)]
        return self.output(torch.cat(projected, dim=-1))

    def _attend(
        self, query: Tensor, attended: Tensor, span: Span, layer: int, step: Step, asked: tuple[Tensor, Tensor] | None
    ) -> None:
        """Writes the attention output of one sequence's queries (T, heads, columns) to `attended` of the same shape.
        Each query is computed alone: the output is batch invariant. asked: `EntryIndexer.queries` of the step; None:
        attention over all entries."""
        sizes, places = self.sizes, step.cache.beside[layer]
        keys = read_rows(step.cache.keys[layer], span.row, sizes.window)
        entries, index_keys = (
            step.cache.keys[places[at]][span.row.slab] if at < len(places) else keys[:, :0] for at in (1, 3)
        )
        before = span.row.end - keys.shape[1]  # of the first key
        for token, position in zip(range(span.begin, span.end), range(span.row.first, span.row.end), strict=True):
            window = keys[:, max(0, position - sizes.window + 1 - before) : position + 1 - before]
            ended = 0 if sizes.compressor is None else (position + 1) // sizes.compressor.rate
            found = entries[:, :ended]
            if asked is not None and self.indexer is not None:
                queries, weights = asked
                found = found[:, self.indexer.choose(queries[token], weights[token], index_keys[0, :ended])]
            both, own = torch.cat((window, found), dim=1), slice(token, token + 1)
            attended[own] = attend_with_sinks(query[own], both, both, sizes.columns**-0.5, None, self.sinks)
