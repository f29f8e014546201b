"""Sparse attention to chosen positions (DeepSeek-V3.2): an indexer chooses the positions that a token attends to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tiermoe.model.cache.kv import LayerShape
from tiermoe.model.cache.memory import read_rows, write_rows
from tiermoe.model.linear import Linear
from tiermoe.model.norms import LayerNorm, Norm
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
        """Whether a token's scores do not depend on the other tokens of a call of up to FEW_TOKENS."""
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
        chosen = torch.arange(most, dtype=torch.int32).repeat(len(x), 1)
        chosen.masked_fill_(chosen > step.positions[:, None], -1)
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
