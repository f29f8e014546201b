"""Attention over a window and over compressed positions (DeepSeek-V4): all heads share one key a position, which is its
value too. Layers compress few positions into an entry, of which an indexer chooses, or many, or have a window alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiermoe.model.attention.base import (
    SINK_SCORE_BYTES,
    Attention,
    AttentionSizes,
    attend_with_sinks,
    mask_of,
    scores_at_once,
)
from tiermoe.model.attention.compressor import (
    Compressor,
    CompressorSizes,
    EntryIndexer,
    EntryIndexerSizes,
    compressor,
    entry_indexer,
)
from tiermoe.model.cache.kv import LayerShape
from tiermoe.model.cache.memory import read_rows, write_rows
from tiermoe.model.linear import Linear, PlainLinear
from tiermoe.model.norms import Norm
from tiermoe.model.rotary import layer_kinds, rope_last
from tiermoe.model.step import Span, Step
from tiermoe.model.weights import Scope
from tiermoe.types import Workload

_FLOAT_BYTES = 4
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
        """Scores and masks, and keys in order, of as many entries as a token attends to; what compressing and choosing
        take."""
        tokens = min(load.chunk, load.context)
        attended, choosing = self.window + tokens, 0
        if self.compressor is not None:
            entries = load.context // self.compressor.rate
            attended += entries if self.indexer is None else min(entries, self.indexer.most)
            choosing = self.compressor.nbytes(load)
        choosing += 0 if self.indexer is None else self.indexer.nbytes(load)
        masks = 3 * tokens * attended
        keys = 2 * attended * self.columns * (load.itemsize + _FLOAT_BYTES)
        return scores_at_once(self.heads, tokens, attended) * SINK_SCORE_BYTES + masks + keys + choosing


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

    def __call__(self, x: Tensor, layer: int, step: Step) -> Tensor:
        """x (T, H), normed → (T, H). Writes the tokens' keys, and what is compressed of them, into the step's cache."""
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
        for span in step.apart:
            own = slice(span.begin, span.end)
            write_rows(step.cache.keys[layer], span.row, key[own])
            keys = read_rows(step.cache.keys[layer], span.row, sizes.window)
            entries = self._entries(step, places, 1, span)
            if asked is None or self.indexer is None or entries.shape[1] <= self.indexer.sizes.most:
                attended[own] = self._attended(query[own], keys, entries, span)
            else:
                index_keys = self._entries(step, places, 3, span)[0]
                attended[own] = self._sparsely(query[own], keys, entries, span, asked, index_keys)
        grouped = rope_last(attended, cos, -sin).view(tokens, sizes.groups, -1).unbind(1)
        projected = [each(part.contiguous()) for each, part in zip(self.groups, grouped, strict=True)]
        return self.output(torch.cat(projected, dim=-1))

    def _entries(self, step: Step, places: range, at: int, span: Span) -> Tensor:
        """A sequence's entries (1, n, columns) that end before or with its last token; none in a layer with a window
        alone."""
        if self.sizes.compressor is None:
            return self.sinks.new_empty((1, 0, self.sizes.columns), dtype=step.cache.dtype)
        return step.cache.keys[places[at]][span.row.slab, :, : span.row.end // self.sizes.compressor.rate]

    def _attended(self, query: Tensor, keys: Tensor, entries: Tensor, span: Span) -> Tensor:
        """A sequence's queries (T, heads, columns) over its window's keys and all of its entries, (1, n, columns)
        each."""
        tokens, both = len(query), torch.cat((keys, entries), dim=1)
        mask = mask_of(tokens, keys.shape[1], self.sizes.window, query.device)
        if mask is not None and self.sizes.compressor is not None:
            ended = torch.arange(span.row.first + 1, span.row.end + 1) // self.sizes.compressor.rate
            mask = torch.cat((mask, torch.arange(entries.shape[1]) < ended[:, None]), dim=1)
        return attend_with_sinks(query, both, both, self.sizes.columns**-0.5, mask, self.sinks)

    def _sparsely(
        self,
        query: Tensor,
        keys: Tensor,
        entries: Tensor,
        span: Span,
        asked: tuple[Tensor, Tensor],
        index_keys: Tensor,
    ) -> Tensor:
        """`_attended` with the entries that are chosen for each token alone. asked: `EntryIndexer.queries` of the step;
        index_keys (n, columns): of the entries."""
        assert self.indexer is not None
        assert self.sizes.compressor is not None
        result, begin = torch.empty_like(query), span.row.end - keys.shape[1]  # of the first key
        queries, weights = (each[span.begin : span.end] for each in asked)
        for token, position in enumerate(range(span.row.first, span.row.end)):
            ended = (position + 1) // self.sizes.compressor.rate
            chosen = self.indexer.choose(queries[token], weights[token], index_keys[:ended])
            window = keys[:, max(0, position - self.sizes.window + 1 - begin) : position + 1 - begin]
            both = torch.cat((window, entries[:, chosen]), dim=1)
            own = slice(token, token + 1)
            result[own] = attend_with_sinks(query[own], both, both, self.sizes.columns**-0.5, None, self.sinks)
        return result
