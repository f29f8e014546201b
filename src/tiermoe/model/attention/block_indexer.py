"""Sparse attention by blocks (Qwen3.8): an indexer chooses the blocks of positions that a token attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiermoe.model.cache.memory import write_rows
from tiermoe.model.linear import Linear
from tiermoe.model.norms import Norm
from tiermoe.model.rotary import rope_halves
from tiermoe.model.step import Span, Step
from tiermoe.model.weights import Scope
from tiermoe.types import Workload

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class BlockIndexerSizes:
    """The description of a `BlockIndexer`."""

    heads: int
    columns: int  # of a head's query, and of a key
    block: int  # positions of a block
    blocks: int  # whole blocks that a token attends to, at the most

    @property
    def most(self) -> int:
        """Positions that a token attends to, at the most: those of its blocks, and those behind the last whole one."""
        return self.blocks * self.block + self.block - 1

    def nbytes(self, load: Workload) -> int:
        """Workspace of one sequence: its blocks' keys and scores as float32, the positions found for all tokens of a
        step, and the tokens' queries."""
        keys = (load.context // self.block) * _FLOAT_BYTES * (self.columns + 2 * self.heads + 6)
        tokens = load.tokens * (self.heads + 1) * self.columns * (3 * load.itemsize + _FLOAT_BYTES)
        return keys + load.tokens * self.most * _FLOAT_BYTES + tokens


def block_indexer(w: Scope, config: Any) -> BlockIndexer:
    """The indexer with the weights of `w` ('self_attn.indexer')."""
    block, columns = config.indexer_compress_ratio, config.indexer_head_dim
    sizes = BlockIndexerSizes(config.indexer_n_heads, columns, block, config.indexer_budget // block)
    project = w.linear("index_qk_proj", (sizes.heads + 1) * columns, w.hidden)
    return BlockIndexer(sizes, project, w.norm("q_layernorm", columns), w.norm("k_layernorm", columns))


@dataclass(frozen=True, slots=True)
class BlockIndexer:
    """Chooses the `sizes.blocks` whole blocks of the largest scores, of those that end before or with a token's own
    position; the positions behind the last of them are always chosen.

    Each position keeps a key. Where a block ends, the last of its positions keeps the block's key in its place: the
    normed mean of the block's keys, rotated by the angles of the first. A token's score of a block is the sum over
    heads of relu(query · key), float32. Each token's are computed by themselves over its own blocks alone, as in
    transformers, so that of equal scores the same are chosen."""

    sizes: BlockIndexerSizes
    project: Linear  # hidden → heads' queries, and a key
    query_norm: Norm
    key_norm: Norm  # of a block's key

    @property
    def batch_invariant(self) -> bool:
        return self.project.batch_invariant

    def __call__(self, x: Tensor, layer: int, step: Step) -> None:
        """x (T, H), normed: writes the tokens' keys into the step's cache, and sets the positions that the tokens
        attend to in this layer."""
        sizes, kept = self.sizes, step.cache.index_keys[layer]
        projected = self.project(x).view(len(x), sizes.heads + 1, sizes.columns)
        for span in step.apart:
            write_rows(kept, span.row, projected[span.begin : span.end, sizes.heads :])
            self._end_blocks(kept[span.row.slab, 0], span, step)
        if step.longest <= sizes.most:
            return step.choose(None)
        queries = rope_halves(self.query_norm(projected[:, : sizes.heads].contiguous()), step.cos, step.sin).float()
        chosen = torch.full((len(x), sizes.most), -1, dtype=torch.int32)
        for span in step.apart:
            if span.row.end > sizes.most:
                self._search(queries, kept[span.row.slab, 0], span, chosen)
        return step.choose(chosen)

    def _end_blocks(self, kept: Tensor, span: Span, step: Step) -> None:
        """Puts the keys of the blocks that end with a row's tokens into kept (room, columns)."""
        block, row = self.sizes.block, span.row
        begin, end = row.first // block * block, row.end // block * block
        if begin == end:
            return
        means = kept[begin:end].view(-1, block, self.sizes.columns).float().mean(dim=1).to(kept.dtype)
        cos, sin = step.rotaries[0].at(torch.arange(begin, end, block), row.end)
        kept[begin + block - 1 : end : block] = rope_halves(self.key_norm(means)[:, None], cos, sin)[:, 0]

    def _search(self, queries: Tensor, kept: Tensor, span: Span, chosen: Tensor) -> None:
        """Writes the positions of a sequence's tokens into `chosen`, ascending; kept (room, columns)."""
        block = self.sizes.block
        keys = kept[block - 1 : span.row.end : block].float()
        for token in range(span.begin, span.end):
            positions = span.row.first + token - span.begin + 1
            whole = positions // block
            scores = torch.matmul(queries[token], keys[:whole].T).T.relu_().sum(dim=-1) / self.sizes.columns**0.5
            best = scores.topk(min(self.sizes.blocks, whole)).indices.sort().values
            found = block_positions(best, block, positions)
            chosen[token, : len(found)] = found


def block_positions(best: Tensor, block: int, positions: int) -> Tensor:
    """Of so many `positions` those in the whole blocks `best` of `block` positions, and those behind the last whole
    one."""
    rest = torch.arange(positions // block * block, positions)
    return torch.cat(((best[:, None] * block + torch.arange(block)).flatten(), rest))
