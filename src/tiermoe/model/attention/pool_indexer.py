"""Sparse attention by pools (GLM-5 Next): an indexer chooses the pools of positions that a token attends to, by a key
of each pool that is made of its positions' keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tiermoe.model.attention.block_indexer import block_positions
from tiermoe.model.attention.compressor import Compressor, CompressorSizes, EntryIndexer, EntryIndexerSizes
from tiermoe.model.attention.indexer import key_norm
from tiermoe.model.cache.kv import LayerShape
from tiermoe.model.linear import Linear, PlainLinear
from tiermoe.model.norms import Norm
from tiermoe.model.step import Span, Step
from tiermoe.model.weights import Scope
from tiermoe.types import Workload

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
        """Positions that a token attends to, at the most: those of its pools, and those behind the last whole one."""
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
    position; the positions behind the last of them are always chosen."""

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
        chosen = torch.full((len(x), self.sizes.most), -1, dtype=torch.int32)
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
            chosen[token, : len(found)] = found
