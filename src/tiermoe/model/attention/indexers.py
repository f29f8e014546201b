"""Sparse attention: indexers choose the positions that a token attends to, one by one (DeepSeek-V3.2), by blocks
(Qwen3.8), or by blocks for each group of heads (MiniMax-M3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tiermoe.model.cache.kv import LayerShape
from tiermoe.model.cache.memory import read_rows, write_rows
from tiermoe.model.parts import LayerNorm, Linear, Norm
from tiermoe.model.rotary import ApplyRope, rope_halves
from tiermoe.model.step import Span, Step
from tiermoe.model.weights import Scope
from tiermoe.types import Workload

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class IndexerSizes:
    """The description of an `Indexer`."""

    heads: int
    columns: int  # of a head's query, and of a key
    most: int  # positions that a token attends to

    @classmethod
    def of(cls, config: Any) -> IndexerSizes:
        """Of all layers that have an indexer."""
        return cls(config.index_n_heads, config.index_head_dim, config.index_topk)

    def nbytes(self, load: Workload) -> int:
        """Workspace of one sequence: keys and scores as float32, the search for the largest scores, and the positions
        found for all tokens of a step."""
        found = load.tokens * self.most * _FLOAT_BYTES
        tokens = load.tokens * self.heads * (self.columns * (3 * load.itemsize + _FLOAT_BYTES) + _FLOAT_BYTES)
        return load.context * (_FLOAT_BYTES * (self.columns + 2 * self.heads + 1) + 16) + found + tokens

    def kept(self, shape: LayerShape) -> LayerShape:
        """A layer's cache with what its indexer keeps."""
        return replace(shape, index_columns=self.columns)


def indexer(
    w: Scope,
    config: Any,
    *,
    rope: ApplyRope = rope_halves,
    rotates_last: bool = False,
    narrow_epsilon: float | None = 1e-6,
    key_epsilon: float | None = 1e-6,
) -> Indexer:
    """The indexer of a latent attention with the weights of `w` ('self_attn'). rope: how queries and keys are rotated;
    rotates_last: their last columns are, not the first. narrow_epsilon, key_epsilon: of the norms of the narrow query
    and of keys; None: the config's."""
    sizes, narrow = IndexerSizes.of(config), config.q_lora_rank
    return Indexer(
        sizes=sizes,
        narrow=w.linear("q_a_proj", narrow, w.hidden),
        narrow_norm=w.norm("q_a_layernorm", narrow, narrow_epsilon),
        query=w.linear("indexer.wq_b", sizes.heads * sizes.columns, narrow),
        key=w.linear("indexer.wk", sizes.columns, w.hidden),
        key_norm=key_norm(w.at("indexer"), sizes.columns, key_epsilon),
        weigh=w.linear("indexer.weights_proj", sizes.heads, w.hidden),
        apply_rope=rope,
        rotates_last=rotates_last,
    )


def key_norm(w: Scope, columns: int, epsilon: float | None) -> LayerNorm:
    """The norm of an indexer's keys. epsilon: None: the config's."""
    weight, bias = w.tensor("k_norm.weight", columns), w.tensor("k_norm.bias", columns)
    return LayerNorm(weight, bias, w.epsilon if epsilon is None else epsilon)


def best_keys(query: Tensor, weights: Tensor, keys: Tensor, most: int) -> Tensor:
    """The places of the `most` largest scores of keys (n, columns), ascending. A score is the sum over heads of
    weight * relu(query · key), by the root of the columns; query (heads, columns), weights (heads)."""
    scores = torch.matmul(query, keys.T).mul_(keys.shape[1] ** -0.5).relu_()
    return torch.matmul(weights, scores).topk(most).indices.sort().values


def first_positions(step: Step, most: int) -> Tensor:
    """Positions 0 .. most - 1 up to each token's own, int32 (T, most), padded with -1: all that a token of a short
    sequence attends to."""
    positions = torch.arange(most, dtype=torch.int32).repeat(len(step.positions), 1)
    return positions.masked_fill_(positions > step.positions[:, None], -1)


@dataclass(frozen=True, slots=True)
class Indexer:
    """Chooses the `sizes.most` positions of the largest scores, of those up to a token's own.

    Each token keeps a key. A token's score of a position is the sum over heads of weight * relu(query · key). Some
    columns of queries and keys are rotated.

    Scores are float32, as in transformers, and each token's are computed by themselves over its own positions alone:
    the choice depends neither on the other tokens of a step nor on how a prompt was cut. Few heads give many equal
    scores: a position that no head finds has 0. Of equal scores the one is chosen that `torch.topk` finds among the
    token's positions, as where transformers decodes one by one; it depends on the length of the row. In a prompt
    transformers' rows have all positions of the prompt, so it may choose another of the equals, and its logits of the
    prompt differ from those of its own decoding: of random weights with two heads by any amount."""

    sizes: IndexerSizes
    narrow: Linear  # hidden → narrow query, with its norm
    narrow_norm: Norm
    query: Linear  # narrow query → heads * columns
    key: Linear  # hidden → columns
    key_norm: Norm
    weigh: Linear  # hidden → the heads' weights
    apply_rope: ApplyRope
    rotates_last: bool = False  # the last columns are rotated, not the first

    @property
    def batch_invariant(self) -> bool:
        return all(each.batch_invariant for each in (self.narrow, self.query, self.key, self.weigh))

    def __call__(self, x: Tensor, layer: int, step: Step) -> None:
        """x (T, H), normed: writes the tokens' keys into the step's cache, and sets the positions that the tokens
        attend to from this layer on."""
        kept, keys = step.cache.index_keys[layer], self._rotated(self.key_norm(self.key(x))[:, None], step)
        for span in step.spans:
            write_rows(kept, span.row, keys[span.begin : span.end])
        step.choose(self._chosen(x, kept, step) if step.longest > self.sizes.most else None)

    def _chosen(self, x: Tensor, kept: Tensor, step: Step) -> Tensor:
        """int32 (T, most)."""
        heads, most = self.sizes.heads, self.sizes.most
        queries = self.query(self.narrow_norm(self.narrow(x))).view(len(x), heads, self.sizes.columns)
        queries = self._rotated(queries, step).float()
        weights = self.weigh(x).float() * heads**-0.5
        chosen = first_positions(step, most)
        for span in step.spans:
            if span.row.end > most:
                self._search(queries, weights, read_rows(kept, span.row, None)[0].float(), span, chosen)
        return chosen

    def _search(self, queries: Tensor, weights: Tensor, keys: Tensor, span: Span, chosen: Tensor) -> None:
        """Writes the positions of a sequence's tokens into `chosen`, ascending; keys (n, columns) of its positions."""
        for token in range(span.begin, span.end):
            positions = span.row.first + token - span.begin + 1
            if positions <= self.sizes.most:
                continue
            chosen[token] = best_keys(queries[token], weights[token], keys[:positions], self.sizes.most)

    def _rotated(self, x: Tensor, step: Step) -> Tensor:
        """x (T, heads, columns) with its first columns rotated, or its last."""
        rotary = step.cos.shape[-1]
        begin = x.shape[-1] - rotary if self.rotates_last else 0
        before, part, behind = x.tensor_split((begin, begin + rotary), dim=-1)
        return torch.cat((before, self.apply_rope(part, step.cos, step.sin), behind), dim=-1)


@dataclass(frozen=True, slots=True)
class BlockIndexerSizes:
    """The description of a `BlockIndexer`."""

    heads: int
    columns: int  # of a head's query, and of a key
    block: int  # positions of a block
    blocks: int  # whole blocks that a token attends to, at the most

    @property
    def most(self) -> int:
        """Positions that a token attends to, at the most: those of its blocks, and those after the last whole one."""
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
    position; the positions after the last of them are always chosen.

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
        for span in step.spans:
            write_rows(kept, span.row, projected[span.begin : span.end, sizes.heads :])
            self._end_blocks(kept[span.row.slab, 0], span, step)
        if step.longest <= sizes.most:
            return step.choose(None)
        queries = rope_halves(self.query_norm(projected[:, : sizes.heads].contiguous()), step.cos, step.sin).float()
        chosen = torch.full((len(x), sizes.most), -1, dtype=torch.int32)
        for span in step.spans:
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
    """Of so many `positions` those in the whole blocks `best` of `block` positions, and those after the last whole
    one."""
    rest = torch.arange(positions // block * block, positions)
    return torch.cat(((best[:, None] * block + torch.arange(block)).flatten(), rest))


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
        scores = 3 * _FLOAT_BYTES * self.groups * load.context
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

    @property
    def batch_invariant(self) -> bool:
        return self.query.batch_invariant and self.key.batch_invariant

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
                self._search(queries, read_rows(kept, span.row, None)[0].float(), span, chosen)
        return step.choose(chosen)

    def _search(self, queries: Tensor, keys: Tensor, span: Span, chosen: Tensor) -> None:
        """Writes the positions of a sequence's tokens into `chosen`, ascending; keys (n, columns) of its positions.
        Each token's are searched for by themselves over its own positions alone, so that it depends on no other."""
        for token in range(span.begin, span.end):
            positions = span.row.first + token - span.begin + 1
            if positions > self.sizes.most:
                chosen[token] = self._positions(self._best(queries[token], keys[:positions]), positions)

    def _best(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The blocks (groups, blocks) of the largest scores of queries (groups, columns), ascending; the last ones of
        keys (n, columns) are among them."""
        sizes, count = self.sizes, -(-len(keys) // self.sizes.block)
        scores = queries.new_full((sizes.groups, count * sizes.block), float("-inf"))
        torch.matmul(queries, keys.T, out=scores[:, : len(keys)])
        by_block = scores.view(sizes.groups, count, sizes.block).amax(-1)
        by_block[:, max(0, count - sizes.local) :] = float("inf")
        return by_block.topk(sizes.blocks).indices.sort().values

    def _positions(self, best: Tensor, positions: int) -> Tensor:
        """The positions of blocks (groups, blocks) of a sequence so long: int32 (groups, most), padded with -1."""
        found = (best[..., None] * self.sizes.block + torch.arange(self.sizes.block)).flatten(1)
        return found.masked_fill(found >= positions, -1).int()
