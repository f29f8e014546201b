"""Sparse attention by blocks for each group of heads (MiniMax-M3): an indexer chooses the blocks of positions that the
heads which share keys and values attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tiermoe.model.cache.memory import read_rows, write_rows
from tiermoe.model.linear import Linear
from tiermoe.model.norms import Norm
from tiermoe.model.rotary import rope_halves
from tiermoe.model.step import Span, Step
from tiermoe.model.weights import Scope
from tiermoe.types import Workload

_SCORES_AT_ONCE = 1 << 22
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class GroupIndexerSizes:
    """The description of a `GroupIndexer`."""

    groups: int  # of heads, each of which has a query of its own
    columns: int  # of a group's query, and of a key
    block: int  # positions of a block
    blocks: int  # that a group attends to, at the most
    local: int  # of them those up to a token's own, whatever their scores

    @property
    def most(self) -> int:
        """Positions that a group attends to, at the most."""
        return self.blocks * self.block

    def nbytes(self, load: Workload) -> int:
        """Workspace of one sequence: its keys and the scores at once as float32, the positions found for all tokens of
        a step, and the tokens' queries."""
        keys = load.context * self.columns * (load.itemsize + _FLOAT_BYTES)
        scores = 3 * _FLOAT_BYTES * max(_SCORES_AT_ONCE, self.groups * load.context)
        tokens = load.tokens * (self.groups + 1) * self.columns * (3 * load.itemsize + _FLOAT_BYTES)
        return keys + scores + tokens + load.tokens * self.groups * self.most * _FLOAT_BYTES


def group_indexer(w: Scope, config: Any) -> GroupIndexer:
    """The indexer with the weights of `w` ('self_attn.indexer')."""
    groups, columns = config.index_n_heads, config.index_head_dim
    sizes = GroupIndexerSizes(
        groups, columns, config.index_block_size, config.index_topk_blocks, config.index_local_blocks
    )
    query, key = w.linear("q_proj", groups * columns, w.hidden), w.linear("k_proj", columns, w.hidden)
    return GroupIndexer(sizes, query, key, w.norm("q_norm", columns), w.norm("k_norm", columns))


@dataclass(frozen=True, slots=True)
class GroupIndexer:
    """Chooses for each group of heads the `sizes.blocks` blocks of the largest scores, of those up to a token's own.

    Each position keeps a key. A group's score of a block is the largest product, float32, of its query with a key of
    the block."""

    sizes: GroupIndexerSizes
    query: Linear  # hidden → groups * columns
    key: Linear  # hidden → columns
    query_norm: Norm
    key_norm: Norm

    batch_invariant: ClassVar[bool] = False
    """Scores of several tokens are one product."""

    def __call__(self, x: Tensor, layer: int, step: Step) -> None:
        """x (T, H), normed: writes the tokens' keys into the step's cache, and sets the positions that each group
        attends to in this layer."""
        sizes, kept = self.sizes, step.cache.index_keys[layer]
        cos, sin = (each[:, : sizes.columns] for each in (step.cos, step.sin))
        keys = rope_halves(self.key_norm(self.key(x))[:, None], cos, sin)
        for span in step.spans:
            write_rows(kept, span.row, keys[span.begin : span.end])
        if step.longest <= sizes.most:
            return step.choose(None)
        queries = self.query_norm(self.query(x).view(len(x), sizes.groups, sizes.columns))
        queries = rope_halves(queries, cos, sin).float()
        chosen = torch.full((len(x), sizes.groups, sizes.most), -1, dtype=torch.int32)
        for span in step.spans:
            if span.row.end > sizes.most:
                self._search(queries, read_rows(kept, span.row, None)[0].float(), span, step, chosen)
        return step.choose(chosen)

    def _search(self, queries: Tensor, keys: Tensor, span: Span, step: Step, chosen: Tensor) -> None:
        """Writes the positions of a sequence's tokens into `chosen`, ascending; keys (n, columns) of its positions."""
        at_once = max(1, _SCORES_AT_ONCE // (self.sizes.groups * len(keys)))
        for begin in range(span.begin, span.end, at_once):
            some = slice(begin, min(begin + at_once, span.end))
            chosen[some] = self._positions(self._best(queries[some], keys, step.positions[some]), step.positions[some])

    def _best(self, queries: Tensor, keys: Tensor, own: Tensor) -> Tensor:
        """The blocks (T, groups, blocks) of the largest scores for tokens at positions own (T), ascending; behind them
        the number of all blocks where there are fewer."""
        sizes, tokens = self.sizes, len(queries)
        count = -(-len(keys) // sizes.block)
        scores = queries.new_full((tokens, sizes.groups, count * sizes.block), float("-inf"))
        torch.matmul(queries, keys.T, out=scores[..., : len(keys)])
        scores[..., : len(keys)].masked_fill_((torch.arange(len(keys)) > own[:, None])[:, None], float("-inf"))
        by_block = scores.view(tokens, sizes.groups, count, sizes.block).amax(-1)
        local = (own[:, None] // sizes.block - torch.arange(sizes.local)).clamp_min(0)
        by_block.scatter_(-1, local[:, None].expand(-1, sizes.groups, -1), float("inf"))
        best = by_block.topk(min(sizes.blocks, count))
        return best.indices.masked_fill(best.values.isneginf(), count).sort().values

    def _positions(self, best: Tensor, own: Tensor) -> Tensor:
        """Of blocks (T, groups, blocks) the positions up to own (T), int32 (T, groups, most); -1: none."""
        positions = best[..., None] * self.sizes.block + torch.arange(self.sizes.block)
        positions = positions.flatten(2).masked_fill(positions.flatten(2) > own[:, None, None], -1)
        return torch.nn.functional.pad(positions, (0, self.sizes.most - positions.shape[2]), value=-1).int()
